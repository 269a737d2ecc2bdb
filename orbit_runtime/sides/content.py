"""Identifies what a run reads by digest: files may move, but their content may not change during a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orbit_runtime.data.prompts import PromptTable
from orbit_runtime.data.rows import source_name
from orbit_runtime.digests import is_older_scheme
from orbit_runtime.errors import OutputError
from orbit_runtime.model_info.content import file_digests
from orbit_runtime.spec import OrbitRun

PREFIX = "content."
"""Prefix of every content name, which sets it apart from the manifest's identity fields in `run.json`."""

WEIGHTS = f"{PREFIX}model.tensors"
"""Digest over every tensor as stored on disk, so it is the same however a trainer shards the model."""
CODE = f"{PREFIX}environment.code"
OLDER_WEIGHTS = f"{PREFIX}model.weights"
"""Recorded by older versions instead: a digest of the weights as loaded by one process."""


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
    check_weights_known(uri, then)
    changed = [path for path in sorted({*then, *now}) if then.get(path) != now.get(path)]
    if changed:
        lines = "".join(f"\n  {path}: {_short(then.get(path))} then, {_short(now.get(path))} now" for path in changed)
        raise OutputError(
            f"the model, the prompts or the code are not those that the run in this folder started with:{lines}",
            where=uri,
            fix="restore those files to continue it, or choose another --out for a new run",
        )


def check_digest_scheme(uri: str, digest: str) -> None:
    """Raises OutputError (73) for a digest in the older scheme: equal bytes have a different digest now."""
    if is_older_scheme(digest):
        raise _written_by_older(uri, digest)


def check_weights_known(uri: str, identity: Mapping[str, Any]) -> None:
    """Raises OutputError (73) if `run.json` records the weights by a digest that this version does not compute."""
    if OLDER_WEIGHTS in identity:
        raise _written_by_older(uri, str(identity[OLDER_WEIGHTS]))


def _written_by_older(uri: str, digest: str) -> OutputError:
    return OutputError(
        f"the run in this folder was written by an older Orbit, whose digests ({digest[:13]}…) cannot be compared "
        "with those of this one",
        where=uri,
        fix="continue it with the version that wrote it, or choose another --out for a new run",
    )


def _short(digest: str | None) -> str:
    return "not there" if digest is None else f"{digest[:19]}…"
