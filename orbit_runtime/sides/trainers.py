"""The trainer of a run: a policy in this process, or ranks that hold it in parts.

Belongs here: what a manifest asks of a trainer, what each kind is made of, and the state that it begins with. Does not
belong here: the engine (`engines`), what trainers do (`training`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from orbit_runtime.adapters.files import MODEL_FILE, plain_key
from orbit_runtime.algorithms.custom_loss import ADVANTAGES, LOSS, hold_given, load_own, own_targets
from orbit_runtime.algorithms.table import Algorithm, build_algorithm, correction_of, loss_settings
from orbit_runtime.errors import InternalError, ModelError, OrbitError, UnsupportedError
from orbit_runtime.planner.support.manifests import ManifestFacts, check_adapted, check_manifest, sampling_of
from orbit_runtime.sides.interface import TrainerOrder, TrainerSide
from orbit_runtime.sides.machine import rounding_facts
from orbit_runtime.spec import Resolved
from orbit_runtime.spec.algorithm import Algorithm as AlgorithmSpec
from orbit_runtime.spec.resolve import with_new_tokens, with_sequences, with_size
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.types import TEACHER_SLOT, Probe, Sampling, Trainer
from orbit_runtime.workers.system import joined_nodes, ray_address

if TYPE_CHECKING:
    from orbit_runtime.adapters.config import AdapterConfig
    from orbit_runtime.checkpoints.adapter_folder import AdapterFolder
    from orbit_runtime.planner.layout import Layout
    from orbit_runtime.policy.facts import PolicyFacts
    from orbit_runtime.policy.load import PolicySettings
    from orbit_runtime.policy.model import Policy
    from orbit_runtime.policy.recompute import Recompute
    from orbit_runtime.training.megatron.outline import Outline
    from orbit_runtime.training.settings import CriticSettings, TeacherSettings, TrainerSettings

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class TrainerLayout:
    """The processes that hold the model, decided."""

    trainer: str
    """`Torch` or `Megatron`."""
    layout: Layout
    micro_batch_tokens: int
    running: int
    """Completions that an engine in the trainer's process samples at the same time."""
    recompute: Recompute
    gpus: tuple[int, ...] | None
    """GPU index of each rank; None on a CPU."""
    nodes: int = 1
    """Number of nodes. With more than one, ranks are on others than this one, in the Ray cluster that `RAY_ADDRESS`
    names.
    """
    widened: bool = False
    """Whether the plan has room for linears held dense, so that no pass casts or dequantises them again."""


def decide_by_size(resolved: Resolved, folder: Path) -> Resolved:
    """Fills a learning rate and a dtype of products that the manifest leaves open; a model of unknown size gets the
    rate of a large one."""
    spec = resolved.run.spec
    if spec.training.learning_rate is not None and spec.model.compute_precision != "Auto":
        return resolved
    from orbit_runtime.model_info.checkpoint import folder_facts

    size = math.inf
    with suppress(OrbitError):
        size = folder_facts(folder).architecture.num_parameters()
    return with_size(resolved, size)


LEAST_NEW_TOKENS = 256
"""Completions of a run that decides their length are not made shorter than this for the KV cache: some wait instead."""


def decide_new_tokens(resolved: Resolved, folder: Path, longest_prompt: Callable[[], int]) -> Resolved:
    """Fills a `maxNewTokens` that the manifest leaves open: what the longest prompt leaves of a sequence, halved while
    an engine in the trainer's process could not sample all completions of a step at once."""
    spec = resolved.run.spec
    if spec.rollout.sampling.max_new_tokens is not None:
        return resolved
    from orbit_runtime.model_info.checkpoint import folder_facts
    from orbit_runtime.planner.verdict import plan_as_run
    from orbit_runtime.sides.machine import planned_machine

    longest = longest_prompt()
    tokens = max(1, spec.model.max_sequence_length - longest)
    with suppress(OrbitError):
        machine, facts = planned_machine(spec.placement, resolved.device), folder_facts(folder)
        while (
            tokens > LEAST_NEW_TOKENS
            and plan_as_run(with_sequences(with_new_tokens(resolved.asked, tokens), longest), facts, machine).waits
        ):
            tokens = max(LEAST_NEW_TOKENS, tokens // 2)
    return replace(resolved, run=with_new_tokens(resolved.run, tokens))


def decide_division(resolved: Resolved, folder: Path, longest_prompt: Callable[[], int] | None = None) -> TrainerLayout:
    """Fills what the manifest leaves open from the plan of this machine.

    Args: longest_prompt: where sequences of full length do not fit, those of the prompts' real lengths are planned.

    Raises:
        UnsupportedError: (78) torch is not installed; or see `check_alone`.
        OrbitError: the planner's, if ranks were requested and the model cannot be planned or divided.
    """
    _check_torch()
    from orbit_runtime.model_info.checkpoint import folder_facts
    from orbit_runtime.planner.layout import Layout
    from orbit_runtime.planner.verdict import check_alone, check_missing, plan_as_run
    from orbit_runtime.sides.machine import planned_machine

    training, asked = resolved.run.spec.training, with_new_tokens(resolved.asked, resolved.run.spec.new_tokens)
    alone = TrainerLayout(
        "Torch",
        Layout(),
        training.micro_batch_tokens,
        resolved.run.spec.rollout.max_running_requests,
        "None" if training.recompute == "Auto" else training.recompute,
        None,
    )
    try:
        machine, facts = planned_machine(resolved.run.spec.placement, resolved.device), folder_facts(folder)
        made = plan_as_run(asked, facts, machine)
        if longest_prompt and made.is_lowered and made.engine == made.trainer == "Torch":
            made = plan_as_run(with_sequences(asked, longest_prompt()), facts, machine)
    except OrbitError:
        if training.trainer == "Torch":
            # A model that cannot be planned keeps everything.
            return alone
        raise
    if training.trainer == "Torch":
        check_alone(made)
    if made.trainer == "Torch":
        return replace(
            alone,
            micro_batch_tokens=made.micro_batch_tokens,
            running=made.kv_sequences if made.waits else alone.running,
            recompute=made.recompute,
            widened=made.widens_base,
        )
    check_missing(made)
    check_rank_packages()
    gpus = tuple(made.devices.trainer) if resolved.device == "cuda" else None
    nodes = joined_nodes(resolved.run.spec.placement.nodes)
    return TrainerLayout("Megatron", made.layout, made.micro_batch_tokens, alone.running, made.recompute, gpus, nodes)


def build_side(
    order: TrainerOrder,
    division: TrainerLayout,
    loss: Callable[..., Any],
    note: Callable[[str], None],
    check: Callable[[], None],
) -> TrainerSide:
    """Builds the trainer in the state that the first step expects.

    Args:
        check: called while ranks start; they end with what it raises.
    """
    if division.recompute != "None":
        note(f"layers are computed again in the backward pass: training.recompute is {division.recompute}")
    if order.resolved.run.spec.adapter.type == "Full":
        return _build_whole(order, division, loss, note)
    if division.trainer == "Megatron":
        return _build_ranks(order, division, loss, note, check)
    return _build_alone(order, division, loss, note)


def _build_ranks(
    order: TrainerOrder,
    division: TrainerLayout,
    loss: Callable[..., Any],
    note: Callable[[str], None],
    check: Callable[[], None],
) -> TrainerSide:
    from orbit_runtime.training.megatron.groups import GroupSizes
    from orbit_runtime.training.megatron.rank import RankSettings
    from orbit_runtime.training.megatron.trainer import MegatronTrainer
    from orbit_runtime.workers.ranks.group import GroupSettings, start_ranks

    resolved, layout = order.resolved, division.layout
    spec = resolved.run.spec
    check_manifest(ManifestFacts(spec, trainer="Megatron"))
    sizes = GroupSizes(
        layout.num_gpus,
        tensor=layout.tensor,
        expert=layout.expert,
        pipeline=layout.pipeline,
        context=layout.context,
        sequence_parallel=layout.tensor > 1,
    )
    sizes.check()
    settings = RankSettings(
        order.folder,
        adapter_config(spec),
        sizes,
        _trainer_settings(resolved, order.model, micro_batch_tokens=division.micro_batch_tokens),
        policy=_policy_settings(resolved),
        recompute=division.recompute,
        loss=loss,
    )
    threads = threads_of_a_rank(-(-sizes.world // max(1, division.nodes - 1)), resolved.device)
    where = "on the CPU" if division.gpus is None else f"on GPUs {division.gpus[0]} to {division.gpus[-1]}"
    if division.nodes > 1:
        where = f"on {division.nodes - 1} nodes of the Ray cluster at {ray_address()}"
    elif spec.placement.nodes > 1:
        note(f"placement.nodes is {spec.placement.nodes}, and RAY_ADDRESS names no Ray cluster: this machine alone")
    note(f"{sizes.world} ranks {where}: {layout.text()}, {threads} threads each")
    logs = Path(order.closing.enter_context(TemporaryDirectory(prefix="orbit-ranks-")))
    ranks = start_ranks(
        GroupSettings(
            target="orbit_runtime.training.megatron.rank:MegatronRank",
            arguments={"settings": settings},
            count=sizes.world,
            devices=rank_devices(division.gpus, division.nodes),
            environment={name: str(threads) for name in THREAD_VARIABLES},
            address=ray_address() if division.nodes > 1 else None,
            nodes=max(1, division.nodes - 1),
        ),
        logs,
        check,
    )
    order.closing.callback(ranks.close)
    trainer = MegatronTrainer(ranks, order.model)
    note(trainer.facts.report.text())
    return TrainerSide(
        trainer,
        trainer.facts,
        begin=partial(_begin, trainer, trainer.outline),
        base_digest=trainer.base_digest,
        probing=partial(trainer.probing, seed=spec.data.seed),
        snapshot=trainer.snapshot,
        policy=None,
        rounding={**rounding_facts(), "ranks": f"{layout.text()}, {threads} threads each"},
        is_over=lambda: ranks.is_closed,
        explain=trainer.explain,
    )


def _build_alone(
    order: TrainerOrder, division: TrainerLayout, loss: Callable[..., Any], note: Callable[[str], None]
) -> TrainerSide:
    """Raises ModelError: the teacher does not fit this base, or its adapter targets other layers."""
    from orbit_runtime.adapters.foreign import load_foreign
    from orbit_runtime.policy.facts import describe
    from orbit_runtime.policy.snapshot import take_snapshot
    from orbit_runtime.training.megatron.outline import outline_of
    from orbit_runtime.training.torch_trainer import TorchTrainer

    resolved, teacher = order.resolved, order.teacher
    policy = build_policy(resolved, order.folder, division.recompute, note, widened=division.widened)
    micro = division.micro_batch_tokens
    if teacher is not None:
        load_foreign(policy.injected.layers, TEACHER_SLOT, teacher.config, teacher.files, teacher.place)
    trainer = TorchTrainer(policy, _trainer_settings(resolved, order.model, micro_batch_tokens=micro), loss)
    return TrainerSide(
        trainer,
        describe(policy),
        begin=partial(_begin, trainer, outline_of(policy.injected, policy.injected.masters)),
        base_digest=policy.base_digest,
        probing=partial(policy.injected.masters.probing, seed=resolved.run.spec.data.seed),
        snapshot=partial(take_snapshot, policy),
        policy=policy,
        rounding=rounding_facts(),
        gives_same_bits=lambda: policy.gives_same_bits,
        explain=trainer.explain,
    )


def _begin(trainer: Trainer, outline: Outline, adapter: AdapterFolder, _digest: str) -> None:
    trainer.load_state(initial_state(outline, adapter))


def _build_whole(
    order: TrainerOrder, division: TrainerLayout, loss: Callable[..., Any], note: Callable[[str], None]
) -> TrainerSide:
    from orbit_runtime.adapters.buffer import publishable
    from orbit_runtime.policy.facts import describe
    from orbit_runtime.policy.whole import load_whole
    from orbit_runtime.training.torch_trainer import TorchTrainer

    settings = _policy_settings(order.resolved)
    policy = load_whole(
        order.folder,
        precision=settings["precision"],
        device=settings["device"],
        compute_dtype=settings["compute_dtype"],
        kernel=settings["kernel"],
        longest=settings["longest"],
        announce=lambda report: note(report.text()),
    )
    policy.recompute(division.recompute)
    micro = division.micro_batch_tokens
    trainer = TorchTrainer(policy, _trainer_settings(order.resolved, order.model, micro_batch_tokens=micro), loss)
    began_with = publishable(trainer, 0).digest
    return TrainerSide(
        trainer,
        describe(policy),
        begin=_no_adapter,
        base_digest=lambda: began_with,
        probing=_no_probe,
        snapshot=None,
        policy=policy,
        rounding=rounding_facts(),
    )


def _no_probe(probe: Probe) -> AbstractContextManager[None]:
    raise InternalError(f"nothing stands beside a model's own weights that could hold the adapter {probe!r}")


def _no_adapter(adapter: AdapterFolder, _digest: str) -> None:
    raise InternalError(f"a model that trains as a whole begins with its own weights, not with {adapter.place}")


def build_policy(
    resolved: Resolved,
    folder: Path,
    recompute: Recompute,
    note: Callable[[str], None] | None = None,
    *,
    widened: bool = False,
) -> Policy:
    """The frozen base with a new adapter, in this process. Raises: as `adapter_config`.

    Args: note: called with the table of layers; widened: whether linears are held dense in the compute dtype.
    """
    from orbit_runtime.policy.load import load_policy, widen

    policy = load_policy(
        folder,
        adapter_config(resolved.run.spec),
        **_policy_settings(resolved),
        announce=note and (lambda report: note(report.text())),
    )
    policy.recompute(recompute)
    return widen(policy) if widened else policy


def _check_torch() -> None:
    """Raises UnsupportedError (78) where torch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "training needs torch, which is not installed", fix="pip install 'orbit-rl[train]'"
        ) from None


def check_rank_packages() -> None:
    """Raises UnsupportedError (78) naming all that ranks need and this installation lacks: not one package at a time,
    and not as an error of a rank."""
    lacking = [extra for extra in ("megatron", "ray") if find_spec(extra) is None]
    if lacking:
        raise UnsupportedError(
            f"trainer ranks need {' and '.join(lacking)}, which this installation lacks",
            where="spec.training.trainer",
            fix=f"pip install 'orbit-rl[{','.join(lacking)}]'",
        )


def adapter_config(spec: RunSpec) -> AdapterConfig:
    """Raises UnsupportedError (78) where the run trains the model itself."""
    from orbit_runtime.adapters.config import AdapterConfig

    check_adapted(spec)
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
    return AdapterConfig(type=adapter.type, targets=tuple(adapter.targets or ()), experts=adapter.experts, **settings)


def _policy_settings(resolved: Resolved) -> PolicySettings:
    import torch

    spec = resolved.run.spec
    return {
        "precision": spec.model.precision,
        "activation_precision": spec.model.activation_precision,
        "seed": spec.data.seed,
        "device": resolved.device,
        "compute_dtype": getattr(torch, resolved.compute_dtype),
        "kernel": spec.training.decided_attention(spec.model.max_sequence_length),
        "longest": spec.model.max_sequence_length,
    }


def load_algorithm(
    resolved: Resolved, search_path: Callable[[], Sequence[str]], given: Callable[..., Any] | None = None
) -> Algorithm:
    """The computations of a step before it trains; no torch.

    Args:
        search_path: called only if the user's functions are imported, into this process.
        given: a function from Python instead of one that the manifest names.
    """
    settings = resolved.run.spec.algorithm
    own = hold_given(given, ADVANTAGES) if given else _own(settings, ADVANTAGES, search_path)
    return build_algorithm(settings, own_advantages=own)


def load_loss(
    resolved: Resolved, search_path: Callable[[], Sequence[str]], given: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The loss of the trainer's side. Args: see `load_algorithm`."""
    _check_torch()
    from orbit_runtime.algorithms.objective import build_loss

    settings = resolved.run.spec.algorithm
    return build_loss(settings, own_loss=hold_given(given, LOSS) if given else _own(settings, LOSS, search_path))


def _own(settings: AlgorithmSpec, field: str, search_path: Callable[[], Sequence[str]]) -> Callable[..., Any] | None:
    return load_own(settings, field, search_path()) if field in own_targets(settings) else None


def _trainer_settings(resolved: Resolved, base_model: str, **divided: int) -> TrainerSettings:
    from orbit_runtime.training.settings import TrainerSettings

    spec = resolved.run.spec
    algorithm, sampling = spec.algorithm, sampling_of(spec.rollout)
    is_sampled = algorithm.type != "SFT"
    return TrainerSettings(
        training=spec.training.model_copy(update=divided),
        decay_steps=resolved.decay_steps or spec.training.steps,
        loss=loss_settings(algorithm),
        reduction=algorithm.objective.reduction,
        constant_length=sampling.max_new_tokens,
        correction=correction_of(algorithm),
        sampling=sampling if is_sampled else Sampling(),
        base_model=base_model,
        seed=spec.data.seed,
        router_replay=spec.rollout.router_replay if is_sampled else "None",
        critic=_critic_settings(spec),
        teacher=_teacher_settings(spec),
    )


def _critic_settings(spec: RunSpec) -> CriticSettings | None:
    from orbit_runtime.training.settings import CriticSettings

    critic = spec.algorithm.decided_critic
    if critic is None:
        return None
    peak = critic.learning_rate or spec.training.decided_rate
    return CriticSettings(peak, critic.value_clip, critic.warmup_steps, critic.rank)


def _teacher_settings(spec: RunSpec) -> TeacherSettings | None:
    from orbit_runtime.policy.distance import Measure
    from orbit_runtime.training.settings import TeacherSettings

    teacher = spec.algorithm.decided_teacher
    if teacher is None or (teacher.type == "Served" and teacher.is_column):
        return None
    measure = None if teacher.is_column else Measure(teacher.beta, teacher.top_k)
    return TeacherSettings(teacher.type, measure, teacher.decay, teacher.every_steps)


def check_replay(spec: RunSpec, facts: PolicyFacts) -> None:
    """Raises UnsupportedError (78) for a model whose tokens cannot be sent to given experts."""
    check_manifest(ManifestFacts(spec, replays=facts.routed is not None))


def rank_devices(gpus: Sequence[int] | None, nodes: int) -> tuple[str, ...] | None:
    """Each rank's GPU by its name on this machine; with several nodes by its index over all nodes, because each node's
    Ray assigns its own."""
    if gpus is None:
        return None
    return visible_gpus(gpus, os.environ) if nodes == 1 else tuple(map(str, gpus))


def visible_gpus(gpus: Sequence[int], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The value of `CUDA_VISIBLE_DEVICES` for each of these indices into the GPUs that this process sees."""
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    names = shown.split(",") if shown else [str(gpu) for gpu in range(max(gpus) + 1)]
    return tuple(names[gpu].strip() for gpu in gpus)


def threads_of_a_rank(ranks: int, device: str) -> int:
    """Threads of one of `ranks` ranks on a node: on a CPU they share the cores; on a GPU each keeps torch's number."""
    import torch

    return max(1, torch.get_num_threads() // (ranks if device == "cpu" else 1))


def initial_state(outline: Outline, adapter: AdapterFolder) -> dict[str, bytes]:
    """The state that a trainer loads: the adapter's values as masters, and an optimizer that has not begun.

    Published values are BF16, so the masters start from BF16 values.

    Args:
        outline: the parts of the trainer's adapter.

    Raises:
        ModelError: (66) the adapter wraps other modules, lays out experts differently, has shapes that do not fit this
            base, is not finite, or has different rotations for layers that share one.
    """
    import torch

    from orbit_runtime.adapters.files import join_tensors
    from orbit_runtime.adapters.state import parse_tensors
    from orbit_runtime.adapters.tensorfile import are_finite, dump
    from orbit_runtime.training.state import PART

    where = f"{adapter.place}/{MODEL_FILE}"
    named = parse_tensors(adapter.files, MODEL_FILE)
    tensors = {plain_key(name): each for name, each in named.items()}
    wanted = {name for held in outline.values() for name in held.file_names}
    if lacking := sorted(wanted - tensors.keys()):
        raise ModelError(
            f"the adapter has nothing for {lacking[0]}: {len(lacking)} of {len(wanted)} tensors are missing",
            where=where,
            fix="write the `spec.adapter.targets` and `experts` of the run that made it",
        )
    if left := sorted(tensors.keys() - wanted):
        raise ModelError(
            f"it adapts {left[0].rpartition('.')[0]}, which this run's adapter does not: {len(left)} tensors "
            "cannot be used",
            where=where,
            fix="write the `spec.adapter.targets` and `experts` of the run that made it",
        )
    if not are_finite(tensors.values()):
        raise ModelError("a tensor is not finite", where=where, fix="take another checkpoint of that training")
    masters: dict[str, torch.Tensor] = {}
    for key, held in outline.items():
        value = join_tensors(held.file_names, tensors).float()
        if tuple(value.shape) != tuple(held.place.shape):
            raise ModelError(
                f"{key} has the shape {list(value.shape)}, this base takes {list(held.place.shape)}",
                where=where,
                fix="it was trained on another base: take one of this model",
            )
        master = f"{held.owner}.{key.rpartition('.')[2]}"
        if not torch.equal(masters.setdefault(f"master/{master}", value), value):
            raise ModelError(
                f"{key} and {master} differ, and share one rotation here, as their layers share an input",
                where=where,
                fix="take an adapter that Orbit trained",
            )
    counters = {"counters": json.dumps({"steps": 0, "updates": 0}, sort_keys=True)}
    return {PART: dump(masters, torch.float32, counters)}
