"""Models behind `builtin://` addresses: where they are, and proof that they are the shipped ones."""

from __future__ import annotations

import hashlib
import json
from difflib import get_close_matches
from pathlib import Path

from orbit_runtime.errors import ModelError
from orbit_runtime.spec.resolve import AUTO_BUILTIN_PRECISION

ROOT = Path(__file__).resolve().parent / "builtin"
REINSTALL = "reinstall orbit-rl; to change a shipped model, copy its folder and name the copy"


def builtin_folder(name: str, precision: str, root: Path = ROOT, *, option: str = "spec.model.precision") -> Path:
    """Folder of a shipped model, e.g. `builtin_folder("tiny-adder", "INT4")`, after checking every file in it.

    Args:
        option: where the user chose the precision, for messages.

    Raises `ModelError` for an unknown name or precision, and for a file that is missing, added or altered.
    """
    shipped = _load_digests(root)
    if name not in shipped:
        near = get_close_matches(name, shipped, n=3, cutoff=0.5)
        raise ModelError(
            f"no shipped model is called `{name}`",
            where=f"builtin://{name}",
            fix=f"did you mean {_quoted(near)}?" if near else f"shipped models: {_quoted(sorted(shipped))}",
        )
    variant = (AUTO_BUILTIN_PRECISION if precision == "Auto" else precision).lower()
    if variant not in shipped[name]:
        available = [known.upper() for known in sorted(shipped[name])]
        raise ModelError(
            f"`{name}` is not shipped in {precision}",
            where=f"builtin://{name}",
            fix=f"set `{option}` to one of {_quoted(available)}",
        )
    folder = root / name / variant
    check_files(folder, shipped[name][variant])
    return folder


def any_builtin_folder(name: str, preferred: str, root: Path = ROOT) -> Path:
    """`builtin_folder` where nobody can choose a precision: the preferred one, or else the first that is shipped."""
    variants = sorted(_load_digests(root).get(name, {}))
    wanted = (AUTO_BUILTIN_PRECISION if preferred == "Auto" else preferred).lower()
    return builtin_folder(name, wanted if wanted in variants or not variants else variants[0], root)


def check_files(folder: Path, digests: dict[str, str]) -> None:
    """Raises `ModelError` naming the first file of `folder` that is missing, differs from its digest, or has none."""
    for file_name, expected in sorted(digests.items()):
        path = folder / file_name
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise ModelError(
                f"a shipped file cannot be read: {error.strerror}", where=str(path), fix=REINSTALL
            ) from error
        if found != expected:
            raise ModelError(
                f"a shipped file was altered: its SHA-256 is {found[:12]}…, not {expected[:12]}…",
                where=str(path),
                fix=REINSTALL,
            )
    for path in sorted(folder.iterdir()):
        if path.name not in digests:
            raise ModelError("this file was not shipped with the model", where=str(path), fix=REINSTALL)


def _load_digests(root: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Model → variant → file → SHA-256."""
    path = root / "digests.json"
    try:
        digests: dict[str, dict[str, dict[str, str]]] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the digests of the shipped models cannot be read: {error}", where=str(path), fix=REINSTALL
        ) from error
    return digests


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
