"""Bundles: a few files that are valid together, such as a checkpoint or an adapter.

Belongs here: parts, digests, the manifest. Does not belong here: what the parts mean, or how many are kept.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orbit_runtime.errors import OutputError
from orbit_runtime.storage.execution import Execution
from orbit_runtime.storage.store import AlreadyExists, CorruptBundle, NotFound, Store

MANIFEST = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a bundle. Example: `Part("checkpoints/step-000012/master-e000003.safetensors", "ab12…", 20480)`"""

    key: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What makes a bundle: it is written last, and its parts are what it says."""

    kind: str
    execution: int
    parts: Mapping[str, Part]
    """By logical name, such as `master.safetensors`."""
    facts: Mapping[str, Any]
    """Small JSON values of the writer: step, policy version, digests."""
    written: float


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle whose parts were read and verified."""

    prefix: str
    manifest: Manifest
    parts: Mapping[str, bytes]

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.manifest.facts


def write_bundle(
    store: Store,
    execution: Execution,
    prefix: str,
    parts: Mapping[str, bytes],
    facts: Mapping[str, Any],
    *,
    kind: str = "",
    plain_names: bool = False,
) -> Manifest:
    """Write parts, then the manifest. Killed anywhere, the folder holds the old bundle, the new one or none.

    Safe to call twice. A bundle that a lower execution left here is replaced; that of a higher one stands.

    Args:
        prefix: the bundle's folder, such as `checkpoints/step-000012`.
        parts: by logical name; the object's name carries the execution number as well.
        facts: JSON values.
        kind: `checkpoint`, `adapter` …; the first folder of the prefix, in singular, unless given.
        plain_names: the object's name is the logical name, for readers that expect it (PEFT).

    Raises:
        OutputError: another execution took over.
    """
    folder = _folder(prefix)
    listed = {
        name: Part(
            f"{folder}{name if plain_names else _numbered(name, execution.number)}",
            hashlib.sha256(data).hexdigest(),
            len(data),
        )
        for name, data in parts.items()
    }
    kind = kind or folder.split("/")[0].removesuffix("s")
    manifest = Manifest(kind, execution.number, listed, dict(facts), store.clock())
    standing = _standing(store, folder)
    if standing is not None:
        _refuse_higher(store, standing, execution)
        if _overwrites(standing, manifest):
            # A kill among the parts must not leave the old manifest above new parts.
            execution.check()
            store.delete([folder + MANIFEST])
            standing = None
    store.put_many([(listed[name].key, data) for name, data in parts.items()])
    execution.check()
    _put_manifest(store, folder, manifest, execution, replace=standing is not None)
    return manifest


def read_manifest(store: Store, prefix: str) -> Manifest:
    """The manifest alone, parts unread.

    Raises:
        NotFound: there is no complete bundle here.
        CorruptBundle: the manifest is not one.
    """
    key = _folder(prefix) + MANIFEST
    try:
        raw = json.loads(store.get(key))
        if raw["format"] != _FORMAT:
            raise CorruptBundle(f"{key} has format {raw['format']}, this version reads {_FORMAT}", where=store.uri)
        parts = {str(name): Part(str(p["key"]), str(p["sha256"]), int(p["bytes"])) for name, p in raw["parts"].items()}
        return Manifest(str(raw["kind"]), int(raw["execution"]), parts, dict(raw["facts"]), float(raw["written"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CorruptBundle(f"{key} is not a manifest", where=store.uri) from None


def read_bundle(store: Store, prefix: str) -> Bundle:
    """Read a bundle and verify every part.

    Raises:
        NotFound: there is no complete bundle here.
        CorruptBundle: names the part that is missing, has another size or another digest.
    """
    folder = _folder(prefix)
    manifest = read_manifest(store, folder)
    contents: dict[str, bytes] = {}
    foreign = [part.key for part in manifest.parts.values() if not _is_key_in(part.key, folder)]
    if foreign:
        raise CorruptBundle(f"{folder}{MANIFEST} names {foreign[0]!r}, outside of its folder", where=store.uri)
    found = store.get_many([part.key for part in manifest.parts.values()])
    for (name, part), data in zip(manifest.parts.items(), found, strict=True):
        if isinstance(data, NotFound):
            raise CorruptBundle(f"{part.key} is missing", where=store.uri)
        if len(data) != part.bytes:
            raise CorruptBundle(f"{part.key} has {len(data)} bytes instead of {part.bytes}", where=store.uri)
        if hashlib.sha256(data).hexdigest() != part.sha256:
            raise CorruptBundle(f"{part.key} was changed: its SHA-256 is not the manifest's", where=store.uri)
        contents[name] = data
    return Bundle(folder, manifest, contents)


def list_bundles(store: Store, prefix: str) -> list[str]:
    """The folders below `prefix` that have a manifest, highest number in the name first, each ending in `/`."""
    ending = f"/{MANIFEST}"
    folders = [key.removesuffix(MANIFEST) for key in store.list(prefix) if key.endswith(ending)]
    depth = _folder(prefix).count("/") + 1
    return sorted((folder for folder in folders if folder.count("/") == depth), key=bundle_order, reverse=True)


def newest_readable(store: Store, prefix: str) -> tuple[Bundle | None, tuple[str, ...]]:
    """The newest bundle that verifies, and why each newer one does not. `None` when there is none at all."""
    skipped: list[str] = []
    for folder in list_bundles(store, prefix):
        try:
            return read_bundle(store, folder), tuple(skipped)
        except (CorruptBundle, NotFound) as error:
            skipped.append(error.message)
    return None, tuple(skipped)


def bundle_order(folder: str) -> list[tuple[int, str]]:
    """Sorts `policy-v9` before `policy-v12`."""
    return [(int(piece), "") if piece.isdigit() else (0, piece) for piece in re.split(r"(\d+)", folder)]


def _put_manifest(store: Store, folder: str, manifest: Manifest, execution: Execution, *, replace: bool) -> None:
    data = json.dumps({"format": _FORMAT, **asdict(manifest)}, indent=1, allow_nan=False).encode()
    try:
        store.put(folder + MANIFEST, data, create_only=not replace)
    except AlreadyExists:
        standing = _standing(store, folder)
        if standing is not None:
            _refuse_higher(store, standing, execution)
        store.put(folder + MANIFEST, data)


def _standing(store: Store, folder: str) -> Manifest | None:
    """The manifest that is there. A broken one counts as none at all, but its key has to be freed."""
    try:
        return read_manifest(store, folder)
    except NotFound:
        return None
    except CorruptBundle:
        return Manifest("", 0, {}, {}, 0.0)


def _refuse_higher(store: Store, standing: Manifest, execution: Execution) -> None:
    if standing.execution > execution.number:
        raise OutputError(
            f"execution {execution.number} was taken over: execution {standing.execution} wrote this bundle already",
            where=store.uri,
            fix="nothing here: the newer execution continues the run",
        )


def _overwrites(standing: Manifest, manifest: Manifest) -> bool:
    before = {part.key: part.sha256 for part in standing.parts.values()}
    return any(before.get(part.key, part.sha256) != part.sha256 for part in manifest.parts.values())


def _numbered(name: str, execution: int) -> str:
    stem, dot, ending = name.partition(".")
    return f"{stem}-e{execution:06d}{dot}{ending}"


def _is_key_in(key: str, folder: str) -> bool:
    return key.startswith(folder) and ".." not in key.split("/")


def _folder(prefix: str) -> str:
    return f"{prefix.rstrip('/')}/"
