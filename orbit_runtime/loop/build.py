"""The composition root: a manifest becomes the parts of a run. The only place that knows every package.

Belongs here: choosing and wiring implementations, in the order that finds the cheapest mistakes first.
Does not belong here: what the parts do, or the order of a step (`sync`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orbit_runtime.data.prompts import PromptStream, PromptTable, check_fields, check_lengths, load_prompts
from orbit_runtime.data.rows import PromptSource
from orbit_runtime.environments.asked import fields_read, reward_targets
from orbit_runtime.environments.single_turn import SingleTurn
from orbit_runtime.errors import OrbitError, UnsupportedError
from orbit_runtime.loop.content import Names, content_digests
from orbit_runtime.loop.engines import (
    build_engine,
    change_limit,
    check_token_ids,
    endpoint_headers,
)
from orbit_runtime.loop.inputs import Inputs
from orbit_runtime.loop.keep import Checkpoints
from orbit_runtime.loop.keeper import Keeper
from orbit_runtime.loop.publish import Publisher
from orbit_runtime.loop.show import Show
from orbit_runtime.loop.versions import PolicyVersions
from orbit_runtime.model_info.content import kept_weights_digest
from orbit_runtime.parity.statistics import base_limit
from orbit_runtime.planner.sampling import check_engine, sampling_of
from orbit_runtime.spec import OrbitRun, Resolved, identity_digest
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.storage import Execution, Store
from orbit_runtime.storage.cache import Cache, default_cache
from orbit_runtime.types import Engine, Probe, Tokenizer, Trainer
from orbit_runtime.workers.garbage_collection import gc_paused, unfreeze_objects
from orbit_runtime.workers.reward_protocol import RewardScorer

if TYPE_CHECKING:
    from orbit_runtime.algorithms.table import Algorithm
    from orbit_runtime.policy.model import Policy
    from orbit_runtime.policy.recompute import Recompute
    from orbit_runtime.policy.snapshot import Snapshot
    from orbit_runtime.training.settings import TrainerSettings

SHORT_CANARY, LONG_CANARY = 32, 512
"""Tokens. Digests need few; where log-probs must carry the proof alone, many are weighed together."""
CANARY_ANSWER_TOKENS = 4


@dataclass(frozen=True)
class Parts:
    """Everything a loop needs, built and checked. Nothing here chooses anything any more."""

    run: OrbitRun
    resolved: Resolved
    store: Store
    execution: Execution
    prompts: PromptStream
    environment: SingleTurn
    engine: Engine
    trainer: Trainer
    publisher: Publisher
    versions: PolicyVersions
    algorithm: Algorithm
    names: Names
    content: Mapping[str, str]
    """Digests of the model, the prompts and the code, by name."""
    inputs: Inputs
    reference_fields: tuple[str, ...]
    """Columns of the prompts that hold the expected answer."""
    base_digest: Callable[[], str]
    trainable_parameters: int
    sequences: tuple[tuple[int, ...], ...]
    """Real prompts as token ids: what preflight measures on."""
    probing: Callable[[Probe], AbstractContextManager[None]]
    """A context within which the trainer holds an adapter that nobody trained, for preflight."""
    precision: str
    group_size: int | None
    """Columns of the packed base that share a scale; None: it has no groups."""
    snapshot: Callable[..., Snapshot]
    """`policy.snapshot.take_snapshot` of this run's policy."""
    show: Show

    @property
    def spec(self) -> RunSpec:
        return self.run.spec

    @property
    def identity(self) -> str:
        """Digest of all that changes the run's numbers: settings, model and prompts."""
        return identity_digest(self.run, self.content)

    @property
    def checkpoints(self) -> Checkpoints:
        keeper, keep = self.publisher.keeper, self.spec.checkpoint.keep
        return Checkpoints(self.store, self.execution, keeper, self.trainer, self.identity, keep)


def build_parts(
    resolved: Resolved,
    store: Store,
    execution: Execution,
    show: Show,
    *,
    rewards: Mapping[str, Callable[..., Any]] | None,
    inputs: Inputs,
    names: Names,
    closing: ExitStack,
) -> Parts:
    """Fetches and reads prompts, rewards and model, and wires them. What must be closed is pushed on `closing`.

    Args:
        rewards: functions given from Python, by reward name; they replace the manifest's of that name.
        names: what the first start called model and prompts.
    """
    run = resolved.run
    spec = run.spec
    check_engine(spec)
    for index, endpoint in enumerate(spec.rollout.endpoints):
        endpoint_headers(index, endpoint, os.environ)
    show.stage("reading prompts")
    sources = [
        PromptSource(each.uri, each.format, each.prompt_field, name, inputs.prompts(index))
        for index, (each, name) in enumerate(zip(spec.data.prompts, names.prompts, strict=True))
    ]
    table = load_prompts(sources, limit=spec.data.limit)
    read = fields_read(spec, rewards or {})
    check_fields(table, read)
    scorer = closing.enter_context(_build_scorer(spec, rewards or {}, inputs.search_path()))
    show.stage("fetching the model")
    folder = inputs.model()
    show.stage(f"loading the model, {_amount(folder)}")
    closing.callback(unfreeze_objects)
    with gc_paused():
        from orbit_runtime.data.chat import ChatTokenizer

        tokenizer = ChatTokenizer(folder, spec.data.chat.template_arguments)
        new_tokens = spec.rollout.sampling.max_new_tokens
        check_lengths(table, tokenizer.encode_many, max_prompt_tokens=spec.model.max_sequence_length - new_tokens)
        policy = build_policy(resolved, folder, show.note)
        check_token_ids(spec, policy.vocabulary)
        check_replay(spec, policy)
        from orbit_runtime.policy.snapshot import group_size_of, take_snapshot

        trainer, algorithm = build_trainer(resolved, policy, base_model=names.model)
    show.stage("starting the engine")
    sequences = _sequences(table, tokenizer)
    engine = build_engine(resolved, policy, tokenizer, folder, sequences, closing)
    closing.callback(engine.close)
    show.metrics.add_engine(engine.read_servers)
    keeper = Keeper()
    closing.callback(keeper.close)
    publisher = Publisher(
        store,
        execution,
        keeper,
        engine,
        trainer,
        build_canary(
            sequences,
            SHORT_CANARY
            if all(copy.reads_back for copy in engine.copies())
            else min(LONG_CANARY, spec.model.max_sequence_length),
        ),
        change_limit(policy),
        base_weights=kept_weights_digest(folder, Cache(default_cache(os.environ))),
        base_limit=base_limit(policy.precision, spec.parity.mean_limit)
        if spec.parity.preflight == "Enforce"
        else math.inf,
        max_unproven=spec.parity.max_unproven,
    )
    environment = SingleTurn(
        run.name,
        tokenizer,
        scorer,
        {reward.name: reward.weight for reward in spec.environment.rewards},
        sampling_of(spec),
        spec.algorithm.group_size,
        spec.data.seed,
    )
    stream = PromptStream(table, seed=spec.data.seed, shuffle=spec.data.shuffle, epochs=spec.data.epochs)
    return Parts(
        run=run,
        resolved=resolved,
        store=store,
        execution=execution,
        prompts=stream,
        environment=environment,
        engine=engine,
        trainer=trainer,
        publisher=publisher,
        versions=PolicyVersions(engine),
        algorithm=algorithm,
        names=names,
        content=content_digests(folder, table, policy.base_digest(), inputs.code_digest()),
        inputs=inputs,
        reference_fields=tuple(read) or ("answer",),
        base_digest=policy.base_digest,
        trainable_parameters=policy.injected.report.trainable_parameters,
        sequences=sequences,
        probing=partial(policy.injected.masters.probing, seed=spec.data.seed),
        precision=policy.precision,
        group_size=group_size_of(policy),
        snapshot=partial(take_snapshot, policy),
        show=show,
    )


def _amount(folder: Path) -> str:
    """Bytes of the weights."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _build_scorer(
    spec: RunSpec, functions: Mapping[str, Callable[..., Any]], search_path: Sequence[str]
) -> RewardScorer:
    targets = reward_targets(spec, functions)
    if functions:
        from orbit_runtime.workers.reward_threads import RewardThreads

        return RewardThreads(targets)
    from orbit_runtime.workers.reward_pool import RewardPool

    return RewardPool(targets, search_path=search_path)


def build_policy(resolved: Resolved, folder: Path, note: Callable[[str], None]) -> Policy:
    """The frozen base with a new adapter. Raises UnsupportedError (78) where torch is not installed."""
    try:
        import torch
    except ImportError:
        raise UnsupportedError(
            "training needs torch, which is not installed", fix="pip install 'orbit-rl[train]'"
        ) from None
    from orbit_runtime.adapters.config import AdapterConfig
    from orbit_runtime.policy.load import load_policy

    spec = resolved.run.spec
    adapter = spec.adapter
    settings: dict[str, Any] = {}
    if adapter.lora:
        lora = adapter.lora
        settings = {"rank": lora.rank, "alpha": lora.alpha, "rslora": lora.rslora, "dropout": lora.dropout}
    if adapter.oft:
        oft = adapter.oft
        settings = {
            "block_size": oft.block_size,
            "parametrization": oft.parametrization,
            "neumann_terms": oft.neumann_terms,
            "coft": oft.coft,
            "coft_eps": oft.coft_eps,
        }
    policy = load_policy(
        folder,
        AdapterConfig(type=adapter.type, targets=tuple(adapter.targets or ()), experts=adapter.experts, **settings),
        precision=spec.model.precision,
        activation_precision=spec.model.activation_precision,
        seed=spec.data.seed,
        device=resolved.device,
        compute_dtype=getattr(torch, resolved.compute_dtype),
        kernel=spec.training.decided_attention(spec.model.max_sequence_length),
        announce=lambda report: note(report.text()),
    )
    recompute = _choose_recompute(resolved, folder)
    if recompute != "None":
        note(f"layers are computed again in the backward pass: training.recompute is {recompute}")
    policy.recompute(recompute)
    return policy


def _choose_recompute(resolved: Resolved, folder: Path) -> Recompute:
    """`Auto` is what the plan says; a model that cannot be planned keeps everything."""
    from orbit_runtime.loop.machine import planned_machine
    from orbit_runtime.model_info.checkpoint import folder_facts
    from orbit_runtime.planner.verdict import plan_as_run

    asked = resolved.run.spec.training.recompute
    if asked != "Auto":
        return asked
    try:
        machine = planned_machine(resolved.run.spec.placement, resolved.device)
        return plan_as_run(resolved.asked, folder_facts(folder), machine).recompute
    except OrbitError:
        return "None"


def build_trainer(resolved: Resolved, policy: Policy, *, base_model: str) -> tuple[Trainer, Algorithm]:
    """As the first step finds it."""
    from orbit_runtime.algorithms.table import ALGORITHMS
    from orbit_runtime.training.torch_trainer import TorchTrainer

    algorithm = ALGORITHMS[resolved.run.spec.algorithm.type]
    return TorchTrainer(policy, _trainer_settings(resolved, base_model), algorithm.loss), algorithm


def _trainer_settings(resolved: Resolved, base_model: str) -> TrainerSettings:
    from orbit_runtime.algorithms.losses import PolicyLossSettings
    from orbit_runtime.training.settings import TrainerSettings

    spec = resolved.run.spec
    training, algorithm, sampling = spec.training, spec.algorithm, spec.rollout.sampling
    in_loss = algorithm.kl.placement == "Loss"
    loss = PolicyLossSettings(
        clip_low=algorithm.clip.low,
        clip_high=algorithm.clip.high,
        kl_coefficient=algorithm.kl.coefficient if in_loss else 0.0,
        kl_estimator=algorithm.kl.estimator,
    )
    importance = algorithm.importance_sampling
    return TrainerSettings(
        peak_learning_rate=training.learning_rate,
        schedule=training.schedule.type,
        warmup_steps=training.schedule.warmup_steps,
        decay_steps=resolved.decay_steps or training.steps,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        micro_batch_tokens=training.micro_batch_tokens,
        mini_batch_prompts=training.mini_batch_prompts,
        update_epochs=training.update_epochs,
        loss=loss,
        reduction=algorithm.reduction,
        constant_length=sampling.max_new_tokens,
        importance_cap=importance.cap if importance.type == "TokenTruncated" else None,
        sampling=sampling_of(spec),
        base_model=base_model,
        seed=spec.data.seed,
        router_replay=spec.rollout.router_replay,
    )


def check_replay(spec: RunSpec, policy: Policy) -> None:
    """Raises UnsupportedError (78) for a model whose tokens cannot be sent to given experts."""
    if spec.rollout.router_replay != "None" and policy.routing is None:
        raise UnsupportedError(
            "this model has no routed experts, or routers that no other choice can be given to",
            where="spec.rollout.routerReplay",
            fix="remove it",
        )


def _sequences(table: PromptTable, tokenizer: Tokenizer, count: int = 8) -> tuple[tuple[int, ...], ...]:
    """The first prompts with their chat template, as training sees them."""
    return tuple(tuple(ids) for ids in tokenizer.encode_many([prompt.messages for prompt in table.prompts_P[:count]]))


def build_canary(sequences: Sequence[tuple[int, ...]], tokens: int) -> tuple[int, ...]:
    """Ends of real prompts, one after the other, then a few of the first one's own tokens again in the answer's place:
    never to be sampled. At least one prompt's end, however short the prompts are."""
    each = max(SHORT_CANARY, tokens // len(sequences)) - CANARY_ANSWER_TOKENS
    prompts: tuple[int, ...] = ()
    for sequence in sequences:
        if len(prompts) + CANARY_ANSWER_TOKENS < tokens:
            prompts += sequence[-each:]
    first = sequences[0][-each:]
    answer = [first[index % len(first)] for index in range(CANARY_ANSWER_TOKENS)]
    return (*prompts[: tokens - CANARY_ANSWER_TOKENS], *answer)
