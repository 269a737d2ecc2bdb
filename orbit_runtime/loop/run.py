"""`run`: a manifest in, a run folder out. Opens, continues, runs, reports and closes, also after an error.

Belongs here: the life cycle of one execution, its reports to trackers and webhooks, and its end when memory ran out or
the device hangs. Does not belong here: the order of a step (`steps`), wiring (`build`), noticing a stall
(`workers.child.heartbeat`), kinds of trackers (`observability`).
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from orbit_runtime.errors import (
    EXIT_STOPPED,
    DataError,
    GPUFaultError,
    InternalError,
    ManifestError,
    ModelError,
    OrbitError,
    OutOfMemoryError,
    StalledError,
    StoppedOnRequest,
    UnsupportedError,
    UsageError,
    gpu_fault,
    is_out_of_memory,
)
from orbit_runtime.evaluation.tasks import EvalTask
from orbit_runtime.loop.build import CallerOptions, build_parts, open_demonstration_inputs, open_episode_inputs
from orbit_runtime.loop.display import RunDisplay, StartTimes
from orbit_runtime.loop.keep import keep_failure, stacks_name, step_name
from orbit_runtime.loop.measure import evaluation_fields, read_evaluation
from orbit_runtime.loop.own_code import RunCode, check_code, code_sources, find_code, keep_code, read_records
from orbit_runtime.loop.parity import check_sides
from orbit_runtime.loop.parts import Parts, RunParts
from orbit_runtime.loop.resume import (
    CHECKPOINTS,
    InitialAdapter,
    Origin,
    begin_from,
    begin_with,
    check_same_run,
    find_origin,
    initial_digest,
    open_initial,
    restore,
    restored_wrongly,
)
from orbit_runtime.loop.sft import SftParts, build_sft, check_restored, run_sft
from orbit_runtime.loop.state import RunState
from orbit_runtime.loop.steps import run_steps
from orbit_runtime.loop.teacher import check_teacher
from orbit_runtime.observability.metrics import MetricsRow, RunMetrics, build_row, parse_row
from orbit_runtime.observability.progress import Progress, build_progress
from orbit_runtime.observability.report import build_report
from orbit_runtime.observability.report_html import render_html
from orbit_runtime.observability.status import LiveStatus
from orbit_runtime.observability.termination_message import add_last_words, build_message
from orbit_runtime.observability.trackers import (
    RequestedTracker,
    Tracking,
    Webhook,
    build_body,
    build_webhooks,
    check_trackers,
    notify,
    open_tracker,
)
from orbit_runtime.observability.versions import installed_versions
from orbit_runtime.planner.support.manifests import ManifestFacts, check_manifest
from orbit_runtime.sides.inputs import CODE, Inputs, Names, build_patience, check_content, resolve_names
from orbit_runtime.sides.interface import Sides
from orbit_runtime.sides.local import LocalSides
from orbit_runtime.sides.machine import add_rounding_facts, explain_rounding
from orbit_runtime.spec import MachineFacts, OrbitRun, Resolved, identity_fields, keep_decisions, resolve
from orbit_runtime.spec.description import find_warnings
from orbit_runtime.storage import (
    Execution,
    NotFound,
    Store,
    claim_execution,
    compact_rows,
    newest_readable,
    open_store,
    read_run_file,
)
from orbit_runtime.storage.run_files import RUN_FILE
from orbit_runtime.version import __version__
from orbit_runtime.workers.child.heartbeat import FIX, Stall, owns_process, silent_seconds, watch_stalls
from orbit_runtime.workers.child.signals import StopFlag, stop_on_signals

ATTEMPT_VARIABLE = "ORBIT_ATTEMPT"
"""Name of the attempt, set by the operator. Such a start takes over from an execution that still looks alive."""


_MISTAKES = (DataError, ManifestError, ModelError, UnsupportedError, UsageError)
"""Errors that the user fixes before starting again; `withdraw` spares a folder that holds more than the claim."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    ended: str
    """`done`, `exhausted` (no prompts left), `converged` (`training.stopWhen`) or `stopped` (on request, resumable)."""
    uri: str
    report: Mapping[str, Any]
    """The content of `report.json`."""


def run(
    spec: OrbitRun,
    *,
    out: str | None = None,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
    loss: Callable[..., Any] | None = None,
    advantages: Callable[..., Any] | None = None,
    progress: Progress | None = None,
    manifest_folder: Path | None = None,
    sides: Sides | None = None,
) -> RunResult:
    """Trains until the last step, a stop request or an error; continues from the folder's newest checkpoint.

    Args:
        out: the run folder; default `<storage.uri>/<name>`.
        rewards: functions by reward name, used instead of the manifest's. Such a run can resume only with the same
            functions; the report says so.
        loss, advantages: likewise, instead of `algorithm.entrypoint` and `algorithm.advantage.entrypoint`.
        manifest_folder: base of the manifest's relative paths and entry points; default: the working folder.
        sides: trainer and engine; default: in this process, or started by it.

    Raises:
        OrbitError: with the exit code of its kind; the run folder then holds the last durable step.
    """
    uri = out or f"{spec.spec.storage.uri.rstrip('/')}/{spec.name}"
    attempt = os.environ.get(ATTEMPT_VARIABLE)
    store = open_store(uri)
    execution = claim_execution(store, run_name=spec.name, takeover=attempt is not None, attempt=attempt)
    ended = "failed"
    with ExitStack() as closing:
        closing.callback(lambda: execution.release(ended))
        execution.start_heartbeat()
        stop = closing.enter_context(stop_on_signals())
        show = _build_show(spec, store.uri, execution, attempt, progress, closing)
        webhooks: list[Webhook] = []
        closing.push(lambda kind, _error, _trace: report_end(webhooks, show, store.uri, kind))
        try:
            webhooks += build_webhooks(spec.spec.observability.notify, os.environ)
            search_path = [str(folder) for folder in (manifest_folder, Path.cwd()) if folder]
            stop.on_request, show.stop = show.stopping, stop
            given = CallerOptions(rewards, loss, advantages, search_path, sides or LocalSides())
            given.sides.watch(stop, show.note, store, execution)
            closing.enter_context(watch_stalls(end_stalled(store, execution, show, webhooks)))
            with device_errors_with_stage(show):
                resolve_on = partial(resolve, spec, folder=manifest_folder)
                ended, report = _run(resolve_on, store, execution, show, stop, given, closing)
        except StoppedOnRequest as request:
            # Stopped before the first step, for example during a download.
            ended = "stopped"
            show.status.update(phase="Stopped", message=str(request), exit_code=EXIT_STOPPED)
            raise
        except OrbitError as error:
            ended = type(error).__name__
            show.status.update(phase="Failed", message=str(error), exit_code=error.exit_code)
            if attempt is None and isinstance(error, _MISTAKES):
                # A manifest that never ran must leave nothing behind that looks like a run.
                execution.withdraw(ended)
            raise
    return RunResult(ended.partition(": ")[0], store.uri, report)


def _run(
    resolve_on: Callable[[MachineFacts], Resolved],
    store: Store,
    execution: Execution,
    show: RunDisplay,
    stop: StopFlag,
    given: CallerOptions,
    closing: ExitStack,
) -> tuple[str, Mapping[str, Any]]:
    before = read_run_file(store)
    started = (before or {}).get("started", time.time())
    # What the user can have got wrong is the same on every machine, so it is found before torch has to be asked.
    asked = _kept(resolve_on(MachineFacts(has_cuda=False, num_gpus=0)), before)
    trackers = requested_trackers(asked.run, store, started)
    if before:
        check_same_run(store, before, asked)
    check_manifest(ManifestFacts(asked.run.spec))
    bundle, skipped = newest_readable(store, CHECKPOINTS, in_place=given.sides.in_place)
    origin = find_origin(asked.run, before) if bundle is None else None
    initial = open_initial(asked.run.spec, before) if bundle is None else None
    patience = build_patience(show.note, show.status.beat, stop, store.deadline_seconds)
    inputs = Inputs(asked.run.spec, (before or {}).get("inputs", {}), patience, given.search_path, started)
    build, code = _open(asked, resolve_names(asked.run, before), inputs, given, show, closing)
    recorded = next(reversed(read_records(store)), None)
    other_code = check_code(store.uri, recorded, code.record, accept=asked.run.spec.checkpoint.accept_code)
    resolved = _kept(resolve_on(given.sides.machine(show.stage)), before)
    changes = [*check_same_run(store, before, resolved), *other_code] if before else []
    check_manifest(ManifestFacts(resolved.run.spec))
    parts = build(resolved, store, execution, show, inputs=inputs, closing=closing)
    content = {**parts.content, **initial_digest(initial, before), **given.digests()}
    if before and recorded and CODE in before["identity"].keys() & content.keys():
        # Compared with the record already; what the run began with stays its identity.
        content[CODE] = before["identity"][CODE]
    parts = replace(parts, content=content, code=code)
    if before:
        check_content(store.uri, before, parts.content)
        changes += explain_rounding(before["rounding"][-1:], parts.side.rounding) if "rounding" in before else []
    state = RunState(trainable_parameters=parts.facts.report.trainable_parameters, base_digest=parts.side.base_digest())
    if bundle is not None:
        restore(parts, state, bundle)
        show.note(f"continuing after step {state.step} of {store.uri}", resumed_at=state.step)
    elif origin is not None:
        begin_from(parts, state, origin)
    elif initial is not None:
        begin_with(parts, state, initial)
    for reason in skipped:
        state.warn(f"skipped a damaged checkpoint: {reason}")
    for change in changes:
        show.note(f"changed since the last start: {change}")
    _warn(parts, state, given.functions)
    _write_run_file(parts, state, before, given.functions, origin, initial, started)
    # The trainer has their values; from an object store they are bytes of this process, several times the adapter's.
    del bundle, origin, initial
    for sentence in keep_code(store, execution, state.step, code, recorded):
        show.note(sentence)
    start_trackers(trackers, store, show, state.step, closing)
    total = parts.spec.training.steps
    if state.step >= total:
        show.note(_nothing_left(state.step, total))
    show.status.update(phase="Preflight", total=total, step=state.step, resumed_from_step=state.step)
    if isinstance(parts, SftParts):
        check_restored(parts, state)
    else:
        _start_policy(parts, state, is_new=not state.resumed)
    show.status.update(phase="Running")
    show.target(total, state.step)
    # What is there by now stays until the end: collections of garbage need not walk through all of torch at each step.
    # A step's rollouts are thousands of objects, which collections at the usual threshold walk through many times.
    gc.freeze()
    closing.callback(gc.unfreeze)
    closing.callback(gc.set_threshold, *gc.get_threshold())
    gc.set_threshold(20_000, *gc.get_threshold()[1:])
    ended = run_sft(parts, state, stop) if isinstance(parts, SftParts) else run_steps(parts, state, stop)
    show.status.update(phase="Stopped" if ended == "stopped" else "Done", exit_code=75 if ended == "stopped" else 0)
    report = _finish(store, ended)
    if ended.startswith("converged"):
        show.status.update(message=report["reason"])
    show.progress.finish(report)
    return ended, report


def _kept(resolved: Resolved, before: Mapping[str, Any] | None) -> Resolved:
    return keep_decisions(resolved, before["resolved"]) if before else resolved


def _open(
    asked: Resolved, names: Names, inputs: Inputs, given: CallerOptions, show: RunDisplay, closing: ExitStack
) -> tuple[Callable[..., Parts | SftParts], RunCode]:
    """Opens what the run works on, without torch; returns what builds the parts from it, and the code behind it."""
    spec = asked.run.spec
    held_out: Sequence[EvalTask] = ()
    build: Callable[..., Parts | SftParts]
    if spec.algorithm.type == "SFT":
        demonstrations = open_demonstration_inputs(spec, names, inputs, show)
        build = partial(build_sft, sides=given.sides, materials=demonstrations)
    else:
        episodes = open_episode_inputs(asked.run, names, inputs, given, show, closing)
        build, held_out = partial(build_parts, given=given, materials=episodes), episodes.held_out
    sources = code_sources(spec, held_out, given.rewards or {}, inputs)
    return build, find_code(sources, inputs.code_digest(), os.environ)


def _nothing_left(done: int, total: int) -> str:
    """Message for a run that already has as many steps as its manifest asks for, or more; none is undone."""
    if done > total:
        return (
            f"nothing left to train: spec.training.steps is {total}, and {done} steps are done already; all of them "
            f"stay as they are. To go on, set spec.training.steps above {done}"
        )
    return f"nothing left to train: {done} steps are done; to go on, raise spec.training.steps ({total})"


def _start_policy(parts: Parts, state: RunState, *, is_new: bool) -> None:
    """Publishes the current policy with proof, then measures parity on real prompts, before any token is sampled.

    Args: is_new: no step of the run is done yet, so a teacher is checked first.
    """
    parts.show.stage("preflight")
    state.publication = parts.publisher.publish(state.policy_version, None)
    parts.versions.activate(state.publication)
    digest = state.publication.adapter.digest
    if state.expected_digest not in (None, digest):
        raise restored_wrongly(digest, state)
    state.publishes += 1
    state.publishes_proven += state.publication.is_proven
    check_sides(parts, state, "preflight")
    if is_new:
        for warning in check_teacher(parts):
            state.warn(warning)
            parts.show.note(f"warning: {warning}")


def _build_show(
    spec: OrbitRun,
    uri: str,
    execution: Execution,
    attempt: str | None,
    progress: Progress | None,
    closing: ExitStack,
) -> RunDisplay:
    namespace = spec.metadata.namespace or ""
    number = execution.number
    total = spec.spec.training.steps
    status = LiveStatus(spec.name, namespace=namespace, attempt=number, total=total, silent_seconds=silent_seconds)
    status.update(execution=number)
    metrics = RunMetrics(run=spec.name, namespace=namespace, attempt=number)
    metrics.follow_signs(status.newest_sign)
    progress = progress or build_progress(spec.name, log_format=spec.spec.observability.log_format)
    show = RunDisplay(progress, status, metrics, keeps_rollouts=spec.spec.rollout.max_staleness > 0)
    show.start_times = StartTimes(execution.record_start)
    closing.callback(lambda: add_last_words({**status.snapshot(), "reason": None}))
    port = spec.spec.observability.metrics_port
    if port >= 0:
        from orbit_runtime.observability.live import LivePage
        from orbit_runtime.observability.server import start_server

        live = LivePage(uri)
        closing.callback(live.close)
        server = start_server(status, metrics, port, live=live)
        closing.callback(server.close)
        show.note(f"status, metrics and the report so far at {server.url}", url=server.url)
    return show


SMALLEST_USUAL_RATE = 5e-6
"""Lower rates suit training all weights, about a tenth of an adapter's (LoRA Without Regret, 2025)."""


def _warn(parts: Parts | SftParts, state: RunState, functions: Sequence[str]) -> None:
    rate = parts.spec.training.decided_rate
    if rate < SMALLEST_USUAL_RATE and parts.spec.adapter.type != "Full":
        state.warn(
            f"training.learningRate is {rate:g}, a rate for training all weights; adapters usually take 1e-5 to 2e-3, "
            "about ten times as much or more"
        )
    for warning in find_warnings(parts.spec):
        state.warn(warning)
    if isinstance(parts, Parts):
        _warn_of_rollouts(parts, state)
    if functions:
        state.warn(
            f"given from Python: {', '.join(functions)}. The run can resume only with the same functions; they are "
            "compared by their own source, not by what they call"
        )
    for warning in state.warnings:
        parts.show.note(f"warning: {warning}")


def _warn_of_rollouts(parts: Parts, state: RunState) -> None:
    algorithm, objective = parts.spec.algorithm, parts.spec.algorithm.objective
    kl = (algorithm.kl.coefficient > 0, objective.kl_placement, objective.kl_estimator)
    if kl == (True, "Loss", "K1") and not algorithm.kl.importance_weighted:
        state.warn(
            "the gradient of K1 in the loss is 0 on average, so it does not constrain the policy (arXiv:2506.09477): "
            "set algorithm.kl.importanceWeighted, or estimator: K2, or placement: Reward"
        )
    if parts.resolved.engine == "SGLang" and parts.resolved.device == "cpu" and parts.facts.precision != "BF16":
        state.warn(f"on a CPU SGLang serves the {parts.facts.precision} base dequantised to BF16 (the same values)")
    if parts.spec.rollout.deterministic and parts.resolved.engine == "SGLang" and parts.facts.precision != "BF16":
        state.warn(
            f"rollout.deterministic: SGLang makes products with BF16 weights independent of the batch; with the "
            f"{parts.facts.precision} base completions may differ from one run to the next"
        )
    for copy in parts.engine.copies():
        if not copy.reads_back:
            state.warn(
                f"{copy.name} cannot read its slots back (it runs without Orbit's plug-in): a publish is proven there "
                "by the canary's log-probs alone"
            )


def _write_run_file(
    parts: RunParts,
    state: RunState,
    before: Mapping[str, Any] | None,
    functions: Sequence[str],
    origin: Origin | None,
    initial: InitialAdapter | None,
    started: float,
) -> None:
    """Writes `run.json`: the manifest as given and as resolved, digests, versions, seed, and where it was computed."""
    content = {
        "name": parts.run.name,
        **parts.resolved.to_json(),
        "identity": {**identity_fields(parts.run), **parts.content},
        "identity_digest": parts.identity,
        "names": parts.names.to_json(),
        "inputs": parts.inputs.to_json(),
        "origin": origin.to_json() if origin else (before or {}).get("origin"),
        "initial": initial.to_json() if initial else (before or {}).get("initial"),
        "base_digest": state.base_digest,
        "seed": parts.spec.data.seed,
        "given_from_python": list(functions),
        "versions": {
            "orbit-rl": __version__,
            "python": platform.python_version(),
            **installed_versions(),
        },
        "rounding": add_rounding_facts((before or {}).get("rounding", []), parts.side.rounding),
        "started": started,
        "execution": parts.execution.number,
    }
    parts.store.put(RUN_FILE, json.dumps(content, indent=1).encode())


def _finish(store: Store, ended: str) -> Mapping[str, Any]:
    """Compacts the rows and writes the report, from the folder's content and not from memory."""
    compact_rows(store, "metrics/", "metrics.jsonl")
    report = build_report(store, ended=ended)
    store.put("report.json", json.dumps(report.to_json(), indent=1).encode())
    store.put("report.html", render_html(report).encode())
    return report.to_json()


MEMORY_FIELDS = {
    "preflight": (
        "spec.model.maxSequenceLength",
        "lower it, or sampling.maxNewTokens: both sides first compute the longest possible sequence",
    ),
    "collect": ("spec.rollout.maxRunningRequests", "lower it, or sampling.maxNewTokens"),
    "train": (
        "spec.training.microBatchTokens",
        "lower it: gradients are summed over more and smaller micro-batches; or write training.recompute: PerLayer",
    ),
}
OTHER_MEMORY = ("spec.model.uri", "`orbit plan` shows what each phase takes; choose a smaller model or more memory")


@contextmanager
def device_errors_with_stage(show: RunDisplay) -> Iterator[None]:
    """Replaces torch's or Python's error by OutOfMemoryError (79) or GPUFaultError (80), with the stage of the run."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if (fault := gpu_fault(error)) is not None:
            raise GPUFaultError(f"{fault.message} (stage {show.current})", fix=fault.fix) from error
        if not is_out_of_memory(error):
            raise
        where, fix = MEMORY_FIELDS.get(show.current.split(",")[0], OTHER_MEMORY)
        said = str(error).strip().splitlines()
        raise OutOfMemoryError(
            f"memory ran out in stage {show.current}: {said[0][:300] if said else type(error).__name__}",
            where=where,
            fix=fix,
        ) from error


def end_stalled(
    store: Store, execution: Execution, show: RunDisplay, webhooks: list[Webhook]
) -> Callable[[Stall], None]:
    """The reaction to a `Stall`: the run folder gets the stacks, and a process that belongs to the run ends with 83. In
    any other, such as a notebook's, the user is told and decides.
    """

    def ended(stall: Stall) -> None:
        step = show.step_now or 0
        error = StalledError(
            f"{stall.what} did not end within {stall.seconds:.0f} s (stage {show.current}, step {step}): the device "
            f"does not answer; what every thread was doing is in {stacks_name(step)}",
            where=store.uri,
            fix=f"{FIX}: it goes on from the newest checkpoint",
        )
        # Whatever fails here, the process ends: its GPU is of no use to anybody until it does.
        with suppress(Exception):
            keep_failure(store, step, error, None, stacks=stall.stacks)
        if not owns_process():
            show.note(f"warning: {error}")
            return
        with suppress(Exception):
            show.status.update(phase="Failed", message=str(error), exit_code=error.exit_code)
            add_last_words({**show.status.snapshot(), **build_message(error)})
            report_end(webhooks, show, store.uri, StalledError)
        with suppress(Exception):
            show.progress.close()
        with suppress(Exception):
            print(f"error: {error}", file=sys.stderr, flush=True)
        with suppress(Exception):
            execution.release(StalledError.__name__)
        os._exit(error.exit_code)

    return ended


ROWS_READ = 256


def requested_trackers(run: OrbitRun, store: Store, started: float) -> list[RequestedTracker]:
    """Args: started: when the run first began, the same at each start.

    Raises:
        UnsupportedError: a tracker cannot work. CredentialsError: a tracker has no key.
    """
    marked = hashlib.sha256(f"{run.name} {started!r}".encode()).hexdigest()[:12]
    is_local = "://" not in store.uri
    asked = [
        RequestedTracker(
            each.type,
            each.project,
            each.uri or (f"{store.uri}/tensorboard" if each.type == "TensorBoard" and is_local else None),
            run.name,
            f"{run.name}-{marked}",
            run.to_manifest(),
        )
        for each in run.spec.observability.trackers
    ]
    check_trackers(asked, os.environ)
    return asked


def start_trackers(
    asked: list[RequestedTracker], store: Store, show: RunDisplay, step: int, closing: ExitStack
) -> None:
    """Sends all rows up to `step`, and from then on every row that is shown."""
    earlier = partial(_rows_until, store, step)
    show.trackers = [Tracking(each.kind, partial(open_tracker, each), show.note, earlier) for each in asked]
    for tracking in show.trackers:
        closing.callback(tracking.close)


def _rows_until(store: Store, step: int) -> Iterator[MetricsRow]:
    """Yields the evaluation before the first step, which has no row, then the rows, reading `ROWS_READ` at a time."""
    if (found := read_evaluation(store, 0)) is not None:
        yield build_row(step=0, **evaluation_fields(found))
    for first in range(1, step + 1, ROWS_READ):
        keys = [f"metrics/{step_name(number)}.json" for number in range(first, min(step + 1, first + ROWS_READ))]
        for data in store.view_many(keys):
            if not isinstance(data, NotFound):
                yield parse_row(bytes(data))


def report_end(webhooks: list[Webhook], show: RunDisplay, uri: str, kind: type[BaseException] | None) -> None:
    """Args: kind: type of the error that ended the run. Nothing is sent after a second interrupt: the user is there."""
    if kind is not None and issubclass(kind, KeyboardInterrupt):
        return
    status: Mapping[str, Any] = show.status.snapshot()
    exit_code = status["exit_code"]
    body = build_body(status, exit_code=InternalError.exit_code if exit_code is None else exit_code, uri=uri)
    notify(webhooks, body, show.note)
