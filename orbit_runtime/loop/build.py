"""The composition root: a manifest becomes the parts of a run. The only place that knows every package.

Belongs here: what the caller passes besides the manifest; choosing and wiring implementations, in the order that finds
the cheapest mistakes first: inputs are opened before torch is imported, so that a wrong path or a missing reward is
reported in a second. Does not belong here: what the parts do, or the order of a step (`steps`).
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from orbit_runtime.checkpoints.adapter_folder import AdapterFolder
from orbit_runtime.data.demonstrations import Demonstration, read_demonstrations
from orbit_runtime.data.pass_rates import PassRateBounds, PassRates
from orbit_runtime.data.prompts import PromptTable, check_fields, check_lengths, hold_out, load_prompts
from orbit_runtime.data.rows import PromptSource
from orbit_runtime.data.stream import PromptStream
from orbit_runtime.environments.build import build_environment, build_scorer
from orbit_runtime.environments.targets import environment_target, fields_read, process_limits
from orbit_runtime.evaluation.tasks import EvalTask
from orbit_runtime.loop.display import RunDisplay
from orbit_runtime.loop.fault_finder import FaultFinder
from orbit_runtime.loop.measure import build_held_out, check_held_out_lengths, check_held_out_sampling, open_held_out
from orbit_runtime.loop.parts import Parts
from orbit_runtime.loop.publish import BackgroundWriter, PolicyVersions, Publisher
from orbit_runtime.model_info.content import cached_weights_digest
from orbit_runtime.parity.statistics import base_limit
from orbit_runtime.planner.support.manifests import check_engine, check_teacher_sampling, check_token_ids, sampling_of
from orbit_runtime.sides.engines import change_limit, engine_settings
from orbit_runtime.sides.inputs import PREFIX, Inputs, Names, content_digests
from orbit_runtime.sides.interface import EngineOrder, Sides, TrainerOrder
from orbit_runtime.sides.local import LocalSides
from orbit_runtime.sides.teacher import (
    TaughtEnvironment,
    attach_teacher,
    check_base,
    check_servers,
    open_teacher,
    teacher_digest,
)
from orbit_runtime.sides.trainers import check_replay, decide_new_tokens, load_algorithm
from orbit_runtime.spec import OrbitRun, Resolved
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.storage import Execution, Store
from orbit_runtime.storage.cache import Cache, default_cache
from orbit_runtime.types import Prompt, Tokenizer
from orbit_runtime.workers.system import gc_paused, unfreeze_objects
from orbit_runtime.workers.user_code.environment_pool import EnvironmentPool
from orbit_runtime.workers.user_code.reward_protocol import RewardScorer

SHORT_CANARY, LONG_CANARY = 32, 512
"""Tokens. Digests need few; where log-probs must carry the proof alone, many are weighed together."""
CANARY_ANSWER_TOKENS = 4


def build_parts(
    resolved: Resolved,
    store: Store,
    execution: Execution,
    show: RunDisplay,
    *,
    given: CallerOptions,
    inputs: Inputs,
    materials: EpisodeInputs,
    closing: ExitStack,
) -> Parts:
    """Fetches the model and connects all parts. Pushes what must be closed on `closing`.

    Args:
        given: its functions replace those that the manifest names.
    """
    run, spec = resolved.run, resolved.run.spec
    names, table, pool, teacher = materials.names, materials.table, materials.pool, materials.teacher
    check_engine(spec)
    check_teacher_sampling(spec)
    given.sides.check(resolved)
    algorithm = load_algorithm(resolved, inputs.search_path, given.advantages)
    given.sides.load_loss(resolved, inputs.search_path, given.loss)
    show.stage("fetching the model")
    folder = inputs.model()

    def longest_prompt() -> int:
        from orbit_runtime.data.chat import ChatTokenizer

        tokenizer = ChatTokenizer(folder, spec.data.chat, started=inputs.started)
        encode = partial(tokenizer.encode_many, tools=pool.tools if pool else ())
        longest = check_lengths(table, encode, max_prompt_tokens=spec.model.max_sequence_length - 1)
        return max(longest, check_held_out_lengths(spec, materials.held_out, tokenizer))

    resolved = decide_new_tokens(resolved, folder, longest_prompt)
    if spec.rollout.sampling.max_new_tokens is None:
        show.note(f"rollout.sampling.maxNewTokens is not set: this run takes {resolved.run.spec.new_tokens}")
    resolved = given.sides.settle(resolved, folder, None if pool else longest_prompt)
    run, spec = resolved.run, resolved.run.spec
    check_engine(spec)
    check_held_out_sampling(run)
    weights = cached_weights_digest(folder, Cache(default_cache(os.environ)))
    check_base(teacher, weights)
    what = "the model and starting the engine" if given.sides.starts_engine else "the model"
    show.stage(f"loading {what}, {amount(folder)}")
    closing.callback(unfreeze_objects)
    with gc_paused():
        from orbit_runtime.data.chat import ChatTokenizer

        tokenizer = ChatTokenizer(folder, spec.data.chat, started=inputs.started)
        encode = partial(tokenizer.encode_many, tools=pool.tools if pool else ())
        check_lengths(table, encode, max_prompt_tokens=spec.model.max_sequence_length - spec.new_tokens)
        held_out = build_held_out(spec, materials.held_out, tokenizer)
        sequences = first_sequences(table, tokenizer)
        order = EngineOrder(
            engine_settings(resolved), tokenizer, folder, sequences, closing, is_resumed=execution.number > 1
        )
        given.sides.start_engine(order)
        side = given.sides.open(TrainerOrder(resolved, folder, names.model, closing, teacher))
        check_token_ids(spec, side.facts.vocabulary)
        check_replay(spec, side.facts)
    show.stage("starting the engine")
    engine = given.sides.build_engine(order, side.facts)
    closing.callback(engine.close)
    show.metrics.add_engine(engine.read_servers)
    keeper = BackgroundWriter()
    closing.callback(keeper.close)
    if resolved.engine == "Torch" and side.gives_same_bits():
        change = base = 0.0
    else:
        change = change_limit(side.facts, spec.model.activation_precision)
        base = base_limit(side.facts.precision, spec.parity.mean_limit, resolved.compute_dtype)
    publisher = Publisher(
        store,
        execution,
        keeper,
        engine,
        side.trainer,
        build_canary(
            sequences,
            SHORT_CANARY
            if all(copy.reads_back for copy in engine.copies())
            else min(LONG_CANARY, spec.model.max_sequence_length),
        ),
        change,
        weights,
        FaultFinder(engine, sequences[0], resolved.compute_dtype, side.snapshot, side.explain, side.facts.group_size),
        base_limit=base if spec.parity.preflight == "Enforce" else math.inf,
        max_unproven=spec.parity.max_unproven,
        loads_beside=given.sides.loads_beside and resolved.engine != "Torch",
    )
    environment = build_environment(run.name, spec, tokenizer, materials.scorer, pool, sampling_of(spec.rollout))
    served = attach_teacher(spec, tokenizer, side.facts.vocabulary, sequences, closing)
    environment = TaughtEnvironment(environment, served) if served else environment
    stream = build_stream(table, spec)
    return Parts(
        run=run,
        resolved=resolved,
        store=store,
        execution=execution,
        keeper=keeper,
        prompts=stream,
        environment=environment,
        engine=engine,
        side=side,
        publisher=publisher,
        versions=PolicyVersions(engine),
        algorithm=algorithm,
        names=names,
        content=content_digests(folder, table, weights, inputs.code_digest()) | teacher_digest(teacher),
        inputs=inputs,
        text_of=tokenizer.text_of,
        reference_fields=materials.reference_fields or ("answer",),
        sequences=sequences,
        show=show,
        held_out=held_out,
        teacher=teacher,
        served_teacher=served,
    )


def build_stream(table: PromptTable, spec: RunSpec) -> PromptStream:
    """The prompt stream that `spec.data` describes."""
    data, weights = spec.data, [each.weight for each in spec.data.prompts]
    asked = data.difficulty if spec.algorithm.type != "SFT" else None
    return PromptStream(
        table,
        seed=data.seed,
        shuffle=data.shuffle,
        epochs=data.epochs,
        weights=[weight or 1.0 for weight in weights] if any(weights) else None,
        rates=None if asked is None else PassRates(
            PassRateBounds(asked.low, asked.high, asked.pass_at, asked.revisit_epochs), delay=spec.rollout.max_staleness
        ),
    )  # fmt: skip


def amount(folder: Path) -> str:
    """Bytes of the weights."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def first_sequences(table: PromptTable, tokenizer: Tokenizer, count: int = 8) -> tuple[tuple[int, ...], ...]:
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


@dataclass(frozen=True)
class CallerOptions:
    """Values that a caller passes besides the manifest."""

    rewards: Mapping[str, Callable[..., Any]] | None = None
    """Functions by reward name."""
    loss: Callable[..., Any] | None = None
    """Replaces the function that `spec.algorithm.entrypoint` names."""
    advantages: Callable[..., Any] | None = None
    """Replaces the function that `spec.algorithm.advantage.entrypoint` names."""
    search_path: Sequence[str] = field(default=())
    """Folders searched for entry points after `environment.code`."""
    sides: Sides = field(default_factory=LocalSides)

    @property
    def functions(self) -> list[str]:
        """Descriptions of the functions given from Python."""
        found = [f"reward {name}" for name in sorted(self.rewards or {})]
        return [*found, *(name for name in ("loss", "advantages") if getattr(self, name) is not None)]

    def digests(self) -> dict[str, str]:
        """Name → digest of each function's own source; what it calls or closes over is not covered."""
        functions = {f"environment.rewards.{name}": function for name, function in (self.rewards or {}).items()}
        functions |= {
            f"algorithm.{name}": function
            for name, function in (("loss", self.loss), ("advantages", self.advantages))
            if function is not None
        }
        return {f"{PREFIX}{name}": _source_digest(function) for name, function in functions.items()}


def _source_digest(function: Callable[..., Any]) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):
        # A function typed at the interpreter's prompt, for example, or a callable object.
        return "unknown"
    return f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Opened and checked."""

    names: Names
    """Names that the first start gave to model and prompts."""
    table: PromptTable


@dataclass(frozen=True, slots=True)
class EpisodeInputs(RunInputs):
    """The inputs of a run with rewards."""

    scorer: RewardScorer
    pool: EnvironmentPool | None
    """Processes of the environment or of the tools; None: it needs none."""
    reference_fields: tuple[str, ...]
    """Columns that the shipped rewards read."""
    held_out: tuple[EvalTask, ...]
    """Tasks by which the policy is evaluated while it trains."""
    teacher: AdapterFolder | None
    """The adapter that teaches, as it was read."""


@dataclass(frozen=True, slots=True)
class DemonstrationInputs(RunInputs):
    """The inputs of a run that learns from demonstrations."""

    demonstrations: Sequence[Demonstration]
    trained: PromptTable
    """The rows of the table that are trained on."""
    measured: Sequence[Prompt]
    """The others, which the policy is measured on."""


def open_episode_inputs(
    run: OrbitRun, names: Names, inputs: Inputs, given: CallerOptions, show: RunDisplay, closing: ExitStack
) -> EpisodeInputs:
    """Fetches and reads the prompts, and starts rewards and environment, also of the run's evaluations. Pushes what
    must be closed on `closing`.

    Args: run: with absolute paths; its `Auto` fields have no effect here.

    Raises:
        DataError, ManifestError, UsageError: see `environments.targets.check_local_inputs`.
        UnsupportedError: (78) the package of the environment's type is not installed.
        ModelError: (66) there is no adapter that teaches.
        CredentialsError: (77) a variable that an endpoint needs is not set.
        StorageError: an input cannot be fetched.
    """
    spec = run.spec
    check_servers(spec)
    show.stage("reading prompts")
    table = load_prompts(_prompt_sources(spec, names, inputs), limit=spec.data.limit)
    rewards = given.rewards or {}
    read = fields_read(spec, rewards)
    check_fields(table, read)
    show.stage("starting rewards")
    search_path = inputs.search_path()
    scorer = closing.enter_context(build_scorer(spec, rewards, search_path))
    target, pool = environment_target(spec), None
    if target is not None:
        pool = closing.enter_context(EnvironmentPool(target, limits=process_limits(spec), search_path=search_path))
    held_out = open_held_out(run, inputs, rewards, closing)
    return EpisodeInputs(names, table, scorer, pool, tuple(read), held_out, open_teacher(spec))


def open_demonstration_inputs(spec: RunSpec, names: Names, inputs: Inputs, show: RunDisplay) -> DemonstrationInputs:
    """Like `open_episode_inputs`."""
    show.stage("reading demonstrations")
    table = load_prompts(_prompt_sources(spec, names, inputs), limit=spec.data.limit)
    read = read_demonstrations(table, spec.data.prompts, last_only=spec.data.chat.answers == "Last")
    trained, measured = hold_out(table, spec.data.validation.share if spec.data.validation else 0.0, spec.data.seed)
    return DemonstrationInputs(names, table, read, trained, measured)


def _prompt_sources(spec: RunSpec, names: Names, inputs: Inputs) -> list[PromptSource]:
    """`data.prompts`, fetched."""
    return [
        PromptSource(each.uri, each.format, each.prompt_field, name, inputs.prompts(index))
        for index, (each, name) in enumerate(zip(spec.data.prompts, names.prompts, strict=True))
    ]
