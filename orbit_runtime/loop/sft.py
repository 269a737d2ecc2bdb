"""Supervised fine-tuning on one screen: take demonstrations → train → measure held-out loss → keep.

Belongs here: the parts of such a run, and the order of its steps. Does not belong here: demonstrations themselves
(`data.demonstrations`), how a batch trains (`training`), the life cycle of a run (`run`).

Nothing is sampled, so there is no engine. The adapter is written together with what a loader needs to prove that it
arrived, and the run, server or evaluation that loads it proves it.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.data.demonstrations import EncodedDemonstration, encode_demonstrations
from orbit_runtime.data.samples import build_demonstration_samples, with_column
from orbit_runtime.errors import OrbitError, StoppedOnRequest
from orbit_runtime.loop.build import (
    SHORT_CANARY,
    DemonstrationInputs,
    amount,
    build_canary,
    build_stream,
    first_sequences,
)
from orbit_runtime.loop.display import RunDisplay
from orbit_runtime.loop.keep import keep_failure, keep_rows
from orbit_runtime.loop.measure import ending
from orbit_runtime.loop.metrics_row import with_checkpoint
from orbit_runtime.loop.parts import RunParts
from orbit_runtime.loop.publish import (
    BackgroundWriter,
    Publication,
    adapter_facts,
    whole_files,
    write_adapter_bundle,
    write_model_bundle,
)
from orbit_runtime.loop.resume import restored_wrongly
from orbit_runtime.loop.state import RunState
from orbit_runtime.model_info.content import cached_weights_digest
from orbit_runtime.observability.metrics import FIELDS, MetricsRow, build_row
from orbit_runtime.sides.inputs import Inputs, content_digests
from orbit_runtime.sides.interface import Sides, TrainerOrder
from orbit_runtime.sides.trainers import (
    load_algorithm,
)
from orbit_runtime.spec import Resolved
from orbit_runtime.spec.data import Validation
from orbit_runtime.storage import Execution, Store
from orbit_runtime.storage.cache import Cache, RetryPolicy, default_cache
from orbit_runtime.types import AdapterFiles, Prompt, Sample, Tokenizer, UpdateResult
from orbit_runtime.workers.child.signals import StopFlag
from orbit_runtime.workers.system import gc_paused, unfreeze_objects

ANSWERS, ANSWER_TOKENS, ANSWER_SECONDS = 3, 32, 10.0
"""For the report: demonstrations that are answered, tokens of an answer, and the time after which none is begun."""
ROWS_SECONDS = 5.0
"""Interval at which rows are stored together: a step may take milliseconds, and a write to the store longer."""


@dataclass(frozen=True, kw_only=True)
class SftParts(RunParts):
    """Everything that supervised fine-tuning needs, built and checked."""

    encoded: Mapping[str, EncodedDemonstration]
    """Encoded demonstrations by prompt id."""
    held_out: tuple[EncodedDemonstration, ...]
    """Demonstrations that the policy is measured on and never trained on."""
    tokenizer: Tokenizer
    canary_T: tuple[int, ...]
    weights: str
    """Digest of the base's files."""
    whole_files: Mapping[str, bytes] | None
    """Files to publish beside the weights if all weights train; None if an adapter trains."""

    @property
    def validation(self) -> Validation:
        return self.spec.data.validation or Validation()


def build_sft(
    resolved: Resolved,
    store: Store,
    execution: Execution,
    show: RunDisplay,
    *,
    sides: Sides,
    inputs: Inputs,
    materials: DemonstrationInputs,
    closing: ExitStack,
) -> SftParts:
    """Fetches the model, and wires it with the demonstrations. Pushes everything to be closed on `closing`."""
    spec = resolved.run.spec
    names, table = materials.names, materials.table
    sides.check(resolved)
    algorithm = load_algorithm(resolved, inputs.search_path)
    sides.load_loss(resolved, inputs.search_path, None)
    show.stage("fetching the model")
    folder = inputs.model()
    resolved = sides.settle(resolved, folder)
    spec = resolved.run.spec
    weights = cached_weights_digest(folder, Cache(default_cache(os.environ)))
    tokenizer = ChatTokenizer(folder, spec.data.chat, started=inputs.started)
    show.stage("tokenising demonstrations")
    encoded = encode_demonstrations(
        materials.demonstrations,
        tokenizer,
        max_tokens=spec.model.max_sequence_length,
        place_of=table.prompts_P.place_of,
        tell=partial(_tell, show, inputs.patience),
    )
    show.note(_told(encoded))
    sequences = first_sequences(table, tokenizer)
    show.stage(f"loading the model, {amount(folder)}")
    closing.callback(unfreeze_objects)
    with gc_paused():
        side = sides.open(TrainerOrder(resolved, folder, names.model, closing))
    keeper = BackgroundWriter()
    closing.callback(keeper.close)
    by_id = {prompt.prompt_id: each for prompt, each in zip(table.prompts_P, encoded, strict=True)}
    return SftParts(
        run=resolved.run,
        resolved=resolved,
        store=store,
        execution=execution,
        keeper=keeper,
        prompts=build_stream(materials.trained, spec),
        side=side,
        algorithm=algorithm,
        names=names,
        content=content_digests(folder, table, weights, inputs.code_digest()),
        inputs=inputs,
        sequences=sequences,
        tokenizer=tokenizer,
        canary_T=build_canary(sequences, SHORT_CANARY),
        show=show,
        encoded=by_id,
        held_out=tuple(by_id[prompt.prompt_id] for prompt in materials.measured),
        weights=weights,
        whole_files=whole_files(folder) if spec.adapter.type == "Full" else None,
    )


def _tell(show: RunDisplay, patience: RetryPolicy, _done: int, _all: int) -> None:
    """Called between conversations. Raises StoppedOnRequest if the run is to stop."""
    show.status.beat()
    if patience.stop():
        raise StoppedOnRequest("stopped while demonstrations were tokenised; the same command starts again")


def _told(encoded: Sequence[EncodedDemonstration]) -> str:
    tokens, learned = sum(len(each.token_ids_T) for each in encoded), sum(sum(each.loss_mask_T) for each in encoded)
    return f"{len(encoded)} demonstrations of {tokens} tokens, {learned} of them answers; the chat template fits them"


def run_sft(parts: SftParts, state: RunState, stop: StopFlag) -> str:
    """Runs steps until the last one; returns why it ended: `done`, `exhausted`, `stopped`, or `converged: ` and why.

    With held-out demonstrations, an adapter is written whenever it is the best so far, so the newest is the one to use.
    Without, an adapter is written with every checkpoint.
    """
    training, checkpoint = parts.spec.training, parts.spec.checkpoint
    rows = _Rows(parts, state.rows)
    first, ended = state.step, "done"
    if parts.held_out and state.validated.first is None:
        loss = _measure(parts, state)
        parts.show.note(f"before training, the held-out loss is {loss:.4f} nats per token")
    try:
        while state.step < training.steps:
            if stop:
                parts.show.note(f"{stop.reason} after step {state.step}")
                ended = "stopped"
                break
            if early := ending(parts, state):
                ended = early
                break
            prompts_P = parts.prompts.take(training.prompts_per_step)
            if not prompts_P:
                ended = "exhausted"
                break
            row = _train(parts, state, prompts_P)
            is_last = state.step == training.steps
            if parts.held_out and (is_last or state.step % parts.validation.every_steps == 0):
                started = time.monotonic()
                loss = _measure(parts, state)
                row = build_row(**{**row, "validation_loss": loss, "seconds_evaluate": time.monotonic() - started})
            rows.add(row)
            if state.step % checkpoint.every_steps == 0 and not is_last:
                # Only then does the step exist: every step that a resume continues from has its row.
                rows.flush()
                row = with_checkpoint(row, _keep(parts, state))
                rows.add(row)
            state.row = row
            parts.show.step(row, state)
    finally:
        rows.flush()
    if state.step > first:
        _keep_newest(parts, state)
    _settle(parts, state)
    if state.step > first and ended != "stopped":
        parts.show.stage("evaluate", state.step)
        parts.execution.check()
        parts.store.put_many([("answers.json", json.dumps({"answers": list(_answers(parts))}).encode())])
    return ended


def _answers(parts: SftParts) -> Iterator[dict[str, str]]:
    """The likeliest answers of base and trained policy to a few prompts, held-out ones if there are any."""
    asked = parts.held_out or tuple(parts.encoded.values())
    text, end = parts.tokenizer.decode, time.monotonic() + ANSWER_SECONDS
    for each in asked[:ANSWERS]:
        first = each.loss_mask_T.index(1)
        length = (each.loss_mask_T[first:].tobytes() + b"\0").index(0)
        prompt_T, shown_T = tuple(each.token_ids_T[:first]), tuple(each.token_ids_T[first : first + length])
        # The whole of a model that trains has no base left.
        sides = ("after",) if parts.whole_files is not None else ("after", "base")
        said = {name: text(_answer(parts, prompt_T, shown_T, at, end)) for at, name in enumerate(sides)}
        yield {"prompt": text(prompt_T), "expected": text(shown_T), **said}


def _answer(parts: SftParts, prompt_T: tuple[int, ...], shown_T: tuple[int, ...], side: int, end: float) -> list[int]:
    """The answer of one side of `Trainer.score`. While it follows the demonstration, one pass finds many tokens."""
    said: list[int] = []
    while len(said) < ANSWER_TOKENS and time.monotonic() < end:
        ahead_T = shown_T[len(said) : ANSWER_TOKENS] if tuple(said) == shown_T[: len(said)] else ()
        parts.show.status.beat()
        # The last token is only a place for the one before it to be followed by.
        scored = parts.trainer.score((*prompt_T, *said, *ahead_T, prompt_T[-1]))[side]
        assert scored.top_T is not None, "a trainer reports the likeliest tokens"
        for token in scored.top_T[len(prompt_T) + len(said) :]:
            if token in parts.tokenizer.eos_ids:
                return said
            said.append(token)
            if tuple(said) != shown_T[: len(said)]:
                break
    return said[:ANSWER_TOKENS]


def _measure(parts: SftParts, state: RunState) -> float:
    """Returns the held-out loss. Publishes the adapter if the loss is the lowest so far."""
    parts.show.stage("evaluate", state.step)
    loss = validation_loss(parts)
    if state.validated.take(state.step, loss):
        _settle(parts, state)
        _publish(parts, state)
    return loss


def validation_loss(parts: SftParts) -> float:
    """Mean cross-entropy over the tokens of held-out answers, in nats."""
    samples_D = build_demonstration_samples(parts.held_out)
    tokens = sum(sum(each.loss_mask_T) for each in parts.held_out)
    return -math.fsum(math.fsum(column) for column in parts.trainer.column("policy", samples_D)) / tokens


def _keep(parts: SftParts, state: RunState) -> float:
    """Begins the step's checkpoint once the previous one is durable; returns the seconds that the loop spent on it."""
    started = time.monotonic()
    _settle(parts, state)
    if not parts.held_out:
        _publish(parts, state)
    parts.checkpoints.begin(state, parts.prompts.state(), ())
    return time.monotonic() - started


def _keep_newest(parts: SftParts, state: RunState) -> None:
    """Makes the newest step durable, however the run ended, and records the base digest again."""
    # If all weights train, no base is left to compare.
    state.base_digest_after = None if parts.whole_files is not None else parts.side.base_digest()
    if state.checkpoint_begun != state.step:
        _keep(parts, state)
        return
    _settle(parts, state)
    parts.checkpoints.restate(state, parts.prompts.state(), ())


def _publish(parts: SftParts, state: RunState) -> None:
    """Writes the trainer's adapter, or model, as `policy-v{step}`."""
    parts.show.stage("publish", state.step)
    made = publishable(parts.trainer, state.step)
    if parts.whole_files is None:
        facts = adapter_facts(made, parts.canary_T, parts.trainer.score(parts.canary_T), parts.weights)
        write = partial(write_adapter_bundle, parts.store, parts.execution, made, facts)
    else:
        told = {"version": made.version, "digest": made.digest, "began_with": parts.weights}
        write = partial(write_model_bundle, parts.store, parts.execution, made, parts.whole_files, told)
    parts.keeper.submit(write)
    state.publication = Publication(made, (), ())


def _settle(parts: SftParts, state: RunState) -> None:
    parts.checkpoints.settle(state)
    parts.show.checkpoint(state)


def check_restored(parts: SftParts, state: RunState) -> None:
    """Checks that a resumed trainer holds the adapter named by its checkpoint, if that adapter is of the same step.
    Without a checkpoint there is nothing to check.

    Raises:
        GateError: it holds another adapter.
    """
    expected, version = state.expected_digest, state.policy_version
    if expected is None:
        return
    if version == state.step and (found := publishable(parts.trainer, version, is_kept=False).digest) != expected:
        raise restored_wrongly(found, state)
    state.publication = Publication(AdapterFiles(version, {}, expected), (), ())


def _train(parts: SftParts, state: RunState, prompts_P: Sequence[Prompt]) -> MetricsRow:
    step = state.step + 1
    parts.show.stage("train", step)
    started = time.monotonic()
    encoded = [parts.encoded[prompt.prompt_id] for prompt in prompts_P]
    samples_D: list[Sample] = build_demonstration_samples(encoded)
    try:
        if "reference" in parts.algorithm.needs:
            samples_D = with_column(samples_D, "reference", parts.trainer.column("reference", samples_D))
        result = parts.trainer.update(samples_D)
    except OrbitError as error:
        keep_failure(parts.store, step, error, None)
        raise
    state.step = step
    return _row(state, encoded, result, time.monotonic() - started)


def _row(state: RunState, encoded: Sequence[EncodedDemonstration], result: UpdateResult, seconds: float) -> MetricsRow:
    known = {name: value for name, value in result.metrics.items() if name in FIELDS and name != "kl_old"}
    return build_row(
        **known,
        step=state.step,
        response_tokens_mean=statistics.fmean(sum(each.loss_mask_T) for each in encoded),
        tokens=result.tokens,
        tokens_per_second=result.tokens / seconds if seconds > 0 else None,
        seconds_train=seconds,
        seconds_total=seconds,
    )


@dataclass
class _Rows:
    """Rows that are not stored yet."""

    parts: SftParts
    digests: dict[int, str]
    waiting: list[MetricsRow] = field(default_factory=list)
    stored: float = field(default_factory=time.monotonic)

    def add(self, row: MetricsRow) -> None:
        self.waiting.append(row)
        if time.monotonic() - self.stored >= ROWS_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            keep_rows(self.parts.store, self.parts.execution, self.waiting, self.digests)
        self.waiting, self.stored = [], time.monotonic()
