"""The inputs of a run on this machine: each is fetched just before it is needed, with a line of progress.

Digests identify them: files may move, but their content may not change during a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orbit_runtime.data.prompts import PromptTable
from orbit_runtime.data.rows import source_name
from orbit_runtime.errors import OutputError, StoppedOnRequest
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.content import file_digests
from orbit_runtime.observability.progress import format_seconds
from orbit_runtime.spec import OrbitRun
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.storage.cache import RetryPolicy, Transfer
from orbit_runtime.storage.inputs import FetchedInput, Kind, fetch_input
from orbit_runtime.storage.opening import read_deadline
from orbit_runtime.workers.child.signals import StopFlag

NOTE_SECONDS = 10.0
NAP_SECONDS = 0.2


@dataclass
class Inputs:
    """The inputs of one start, fetched on demand.

    Example: `inputs.model()` is `Path("/models/tiny")`, or a folder of the download cache.
    """

    spec: RunSpec
    """Must have absolute paths."""
    before: Mapping[str, Any]
    """The `inputs` of the first start's `run.json`: a hub branch stays at the commit it had then."""
    patience: RetryPolicy
    folders: Sequence[str]
    """Folders searched for entry points after `environment.code`."""
    started: float | None = None
    """Seconds since 1970 at the run's first start: now, for chat templates that ask."""
    fetched: dict[str, FetchedInput] = field(default_factory=dict)

    def model(self) -> Path:
        uri = self.spec.model.uri
        if uri.startswith("builtin://"):
            return builtin_folder(uri.removeprefix("builtin://"), self.spec.model.precision)
        return self._fetch(uri, "model", "spec.model.uri").path

    def prompts(self, index: int) -> Path | None:
        """The local path of a source of prompts, fetched; `None` for those that ship with Orbit."""
        uri = self.spec.data.prompts[index].uri
        if uri.startswith("builtin://"):
            return None
        return self._fetch(uri, "prompts", f"spec.data.prompts[{index}].uri").path

    def search_path(self) -> list[str]:
        """Folders and archives that entry points are imported from: rewards by their workers, a custom loss or
        advantage function by this process."""
        code = self.spec.environment.code
        found = [] if code is None else [str(self._fetch(code.uri, "code", "spec.environment.code.uri").path)]
        return [*found, *self.folders]

    def code_digest(self) -> str | None:
        code = self.fetched.get("spec.environment.code.uri")
        return None if code is None else code.digest

    def to_json(self) -> dict[str, Any]:
        """Field → address, commit and digest of what was read."""
        return {where: each.to_json() for where, each in self.fetched.items()}

    def _fetch(self, uri: str, kind: Kind, where: str) -> FetchedInput:
        then = self.before.get(where) or {}
        revision = then.get("revision") if then.get("uri") == uri else None
        self.fetched[where] = fetch_input(uri, kind, where, patience=self.patience, revision=revision)
        return self.fetched[where]


def fetch_model(uri: str, note: Callable[[str], None]) -> Path:
    """The folder of a model that no run names, downloaded if necessary, with a line of progress every ten seconds.

    Raises: as `fetch_input`, about `--model`.
    """
    patience = RetryPolicy(read_deadline(os.environ), notice=note, tell=progress_lines(note))
    return fetch_input(uri, "model", "--model", patience=patience).path


def build_patience(
    note: Callable[[str], None],
    beat: Callable[[], None],
    stop: StopFlag,
    deadline_seconds: float,
    *,
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> RetryPolicy:
    """Reports progress every ten seconds, and gives up within a nap of a stop request.

    Args:
        beat: called whenever bytes have arrived.
    """

    def nap(seconds: float) -> None:
        until = monotonic() + seconds
        while (left := until - monotonic()) > 0:
            if stop:
                raise StoppedOnRequest(f"{stop.reason} while waiting for a download; the same command continues it")
            sleep(min(NAP_SECONDS, left))

    done: dict[str, int] = {}
    show_transfer = progress_lines(note, monotonic=monotonic)

    def tell(transfer: Transfer) -> None:
        if transfer.done != done.get(transfer.what):
            beat()
        done[transfer.what] = transfer.done
        show_transfer(transfer)

    return RetryPolicy(
        deadline_seconds, tell=tell, notice=note, stop=lambda: bool(stop), sleep=nap, monotonic=monotonic
    )


def progress_lines(
    note: Callable[[str], None], *, monotonic: Callable[[], float] = time.monotonic
) -> Callable[[Transfer], None]:
    """Writes a line at the start of a download, every ten seconds, and at its end."""
    said: dict[str, float] = {}

    def tell(transfer: Transfer) -> None:
        now = monotonic()
        if transfer.done >= transfer.total or now - said.get(transfer.what, now - NOTE_SECONDS) >= NOTE_SECONDS:
            said[transfer.what] = now
            note(transfer_line(transfer))

    return tell


def transfer_line(transfer: Transfer) -> str:
    """Example: `hf://org/name: 1.2 of 3.4 GiB, 0:12 min left`"""
    scale, unit = next(
        (2**power, name) for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "bytes"))
        if transfer.total >= 2**power or power == 0
    )  # fmt: skip
    digits = 1 if scale > 1 else 0
    amount = f"{transfer.done / scale:.{digits}f} of {transfer.total / scale:.{digits}f} {unit}"
    left = "" if transfer.done >= transfer.total else f", {format_seconds(transfer.seconds_left)} left"
    return f"{transfer.what}: {amount}{left}"


PREFIX = "content."
"""Prefix of every content name, which sets it apart from the manifest's identity fields in `run.json`."""

WEIGHTS = f"{PREFIX}model.tensors"
"""Digest over every tensor as stored on disk, so it is the same however a trainer shards the model."""
CODE = f"{PREFIX}environment.code"


@dataclass(frozen=True)
class Names:
    """Names given to the inputs at the first start. Prompt ids and published files contain them, so they must stay."""

    model: str
    prompts: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"model": self.model, "prompts": list(self.prompts)}


def resolve_names(run: OrbitRun, before: Mapping[str, Any] | None) -> Names:
    """The names in `run.json`, or those of the manifest at the first start."""
    kept = (before or {}).get("names")
    if kept:
        return Names(str(kept["model"]), tuple(map(str, kept["prompts"])))
    spec = run.spec
    # PEFT reads this name in published files; a hub repository goes by its repository name there.
    uri = spec.model.uri
    model = uri.removeprefix("hf://").split("@")[0] if uri.startswith("hf://") else uri
    return Names(model, tuple(source_name(each.uri) for each in spec.data.prompts))


def content_digests(folder: Path, table: PromptTable, weights: str, code_digest: str | None) -> dict[str, str]:
    """Name → digest of the model, each prompts file and `environment.code`, e.g. `content.model.config.json`."""
    digests = {f"{PREFIX}model.{name}": digest for name, digest in file_digests(folder).items()}
    return (
        {WEIGHTS: weights}
        | digests
        | {f"{PREFIX}data.prompts[{index}]": digest for index, digest in enumerate(table.file_digests)}
        | ({} if code_digest is None else {CODE: code_digest})
    )


def check_content(uri: str, before: Mapping[str, Any], now: Mapping[str, str]) -> None:
    """Raises OutputError (73) and names all content that differs from what the run in `run.json` read."""
    then = {path: value for path, value in before.get("identity", {}).items() if path.startswith(PREFIX)}
    changed = [path for path in sorted({*then, *now}) if then.get(path) != now.get(path)]
    if changed:
        lines = "".join(f"\n  {path}: {_short(then.get(path))} then, {_short(now.get(path))} now" for path in changed)
        raise OutputError(
            f"the model, the prompts or the code are not those that the run in this folder started with:{lines}",
            where=uri,
            fix="restore those files to continue it, or choose another --out for a new run",
        )


def _short(digest: str | None) -> str:
    return "not there" if digest is None else f"{digest[:19]}…"
