"""`run`: trains from Python as `orbit run` does, optionally with functions of this process."""

from __future__ import annotations

import asyncio.events
import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orbit_runtime.api.checks import check_before_run, check_can_train
from orbit_runtime.api.manifest import load_manifest
from orbit_runtime.api.report import Report
from orbit_runtime.errors import DataError, OutputError, UsageError
from orbit_runtime.observability.progress import Progress, SilentProgress, build_progress
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage.cache import default_cache
from orbit_runtime.workers.system import gc_paused, wait_asleep
from orbit_runtime.workers.user_code.entrypoints import FROM_PYTHON

if TYPE_CHECKING:
    from orbit_runtime.loop.run import RunResult

Functions = Mapping[str, Callable[..., Any]]


def with_replacements(
    manifest: OrbitRun,
    *,
    rewards: Functions | None,
    loss: Callable[..., Any] | None,
    advantages: Callable[..., Any] | None,
    prompts: Iterable[Mapping[str, Any]] | None,
) -> OrbitRun:
    """The manifest with `FROM_PYTHON` in place of every given function, and with the file of the given rows."""
    changes: dict[str, Any] = {}
    if rewards is not None:
        changes["spec.environment.rewards"] = _rewards(manifest, rewards)
    if loss is not None:
        if manifest.spec.algorithm.type == "SFT":
            message = "demonstrations have a loss of their own: there are no advantages from which to compute another"
            raise UsageError(message, where="loss", fix="leave it out, or choose another algorithm.type")
        changes |= {"spec.algorithm.type": "Custom", "spec.algorithm.entrypoint": FROM_PYTHON}
    if advantages is not None:
        changes["spec.algorithm.advantage"] = {"entrypoint": FROM_PYTHON}
    if prompts is not None:
        columns = manifest.to_manifest()["spec"]["data"]["prompts"][0]
        column = str(columns.get("promptField", "prompt"))
        changes["spec.data.prompts"] = [{**columns, "uri": str(write_rows(prompts, column)), "format": "JSONL"}]
    return load_manifest(manifest, changes)


def _rewards(manifest: OrbitRun, functions: Functions) -> list[dict[str, Any]]:
    """One reward for each function, with weight, arguments and time limit of the manifest's reward of that name."""
    if not isinstance(functions, Mapping) or not functions:
        raise UsageError("no reward is given", where="rewards", fix='give functions by name: {"close": close_number}')
    known = {each["name"]: each for each in manifest.to_manifest()["spec"]["environment"].get("rewards", ())}
    found = []
    for name in functions:
        kept = {key: value for key, value in known.get(name, {"name": name}).items() if key != "type"}
        # Arguments of a shipped reward do not apply to another function.
        if "type" in known.get(name, {}):
            kept.pop("arguments", None)
        found.append({**kept, "entrypoint": FROM_PYTHON})
    return found


def write_rows(rows: Iterable[Mapping[str, Any]], column: str) -> Path:
    """Writes a file in the download cache, named by its content: equal rows are the same prompts, now and on resume.

    Args:
        column: where a row has its prompt.

    Raises:
        DataError: a row is not a mapping of plain values, or has no prompt.
        OutputError: the cache cannot be written.
    """
    lines = []
    for index, row in enumerate(rows):
        where = f"prompts[{index}]"
        if not isinstance(row, Mapping):
            raise DataError(
                f"{type(row).__name__} is not a row", where=where, fix='give a mapping: {"prompt": "12+34="}'
            )
        if column not in row:
            has = ", ".join(repr(name) for name in row) or "nothing"
            fix = f"call the prompt {column!r}, or set spec.data.prompts.0.promptField to its column"
            raise DataError(f"no key {column!r}; the row has: {has}", where=where, fix=fix)
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise DataError(f"not plain values: {error}", where=where, fix="give text, numbers, lists") from None
    if not lines:
        raise DataError("there are no prompts", where="prompts", fix="give at least one row")
    data = "".join(lines).encode("utf-8", errors="surrogatepass")
    path = default_cache(os.environ) / "rows" / hashlib.sha256(data).hexdigest() / "prompts.jsonl"
    if not path.exists():
        part = path.with_name(f"{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            part.replace(path)
        except OSError as error:
            raise OutputError(
                f"the rows cannot be written: {error.strerror}", where=str(path), fix="set ORBIT_CACHE"
            ) from error
    return path


def run(
    manifest: str | Path | Mapping[str, Any] | OrbitRun,
    *,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    rewards: Mapping[str, Callable[..., Any]] | None = None,
    loss: Callable[..., Any] | None = None,
    advantages: Callable[..., Any] | None = None,
    prompts: Iterable[Mapping[str, Any]] | None = None,
    progress: bool = True,
) -> Report:
    """Trains until the last step or a request to stop, and continues a run that is already in the run folder.

    Ctrl-C, or a notebook's *interrupt*, ends it after the step: the report's status is then `stopped`, and the same
    call continues from there. A second one raises KeyboardInterrupt at once.

    Args:
        manifest: as for `load_manifest`.
        out: the run folder or its address; by default the manifest's `<storage.uri>/<name>`.
        overrides: as for `load_manifest`.
        rewards: functions `(completion, prompt, fields, **arguments) -> float` by name, instead of the manifest's
            list. A function named like a reward in the list keeps that reward's weight and time limit.
        loss: a function `(inputs, settings) -> tensor`, as for `type: Custom`.
        advantages: a function `(groups) -> list of lists`, instead of baseline and normalisation.
        prompts: rows, instead of the manifest's files; the column names are those of the first file.
        progress: whether steps are reported while it runs.

    Raises:
        OrbitError: its class says who must act; the folder then holds the last durable step.
    """
    if isinstance(manifest, Mapping):
        manifest = _with_places(manifest, {"prompts": prompts, "rewards": rewards})
    spec = with_replacements(
        load_manifest(manifest, overrides), rewards=rewards, loss=loss, advantages=advantages, prompts=prompts
    )
    shown = _build_progress(spec) if progress else SilentProgress()
    functions = {"rewards": rewards, "loss": loss, "advantages": advantages}
    try:
        result = start_run(spec, spec.folder or Path.cwd(), None if out is None else str(out), shown, **functions)
    finally:
        shown.close()
    return Report(result.uri)


def _with_places(manifest: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The manifest with something in the place of prompts and rewards that it leaves to the call's arguments."""
    stands = {"prompts": ("data", [{"uri": "builtin://two-digit-addition"}]),
              "rewards": ("environment", [{"name": "correct", "type": "ExactMatch"}])}  # fmt: skip
    if not isinstance(manifest.get("spec"), Mapping):
        return manifest
    spec = dict(manifest["spec"])
    for name, (block, value) in stands.items():
        if given[name] is not None and isinstance(spec.get(block) or {}, Mapping):
            spec[block] = {name: value, **(spec.get(block) or {})}
    return {**manifest, "spec": spec}


def start_run(manifest: OrbitRun, folder: Path, out: str | None, progress: Progress, **functions: Any) -> RunResult:
    """Starts a run, for every caller. Reports progress from the beginning, because imports take seconds; the loop
    imports torch once prompts and rewards are known to be there.

    Args:
        folder: the manifest's folder.
        functions: `rewards`, `loss` and `advantages` of `loop.run`.
    """
    check_can_train()
    progress.stage("checking the plan")
    idle = check_before_run(manifest, folder, progress.note)
    if manifest.spec.rollout.engine == "SGLang":
        wait_asleep(os.environ)
    progress.stage("importing the loop")
    with interrupt_kept(), gc_paused():
        from orbit_runtime.loop.run import run as run_loop
    for each in idle:
        progress.note(each)
    with no_running_loop():
        return run_loop(manifest, out=out, progress=progress, manifest_folder=folder, **functions)


@contextmanager
def no_running_loop() -> Iterator[None]:
    """A notebook's cell runs inside an event loop, which waits until the cell ends: a run may have loops of its own."""
    outer = asyncio.events._get_running_loop()
    asyncio.events._set_running_loop(None)
    try:
        yield
    finally:
        asyncio.events._set_running_loop(outer)


def _build_progress(manifest: OrbitRun) -> Progress:
    # Output on standard error looks like a failure in a notebook.
    stream = sys.stdout if "ipykernel" in sys.modules else None
    return build_progress(manifest.name, log_format=manifest.spec.observability.log_format, stream=stream)


@contextmanager
def interrupt_kept() -> Iterator[None]:
    """Raises KeyboardInterrupt at the end if one was raised inside and lost: importing a C library may clear any error,
    and the run would continue to train although Ctrl-C was pressed."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return
    pressed = False

    def handle(number: int, frame: object) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
