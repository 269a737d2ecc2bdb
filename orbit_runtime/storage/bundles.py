"""Bundles: a few files that are only valid together, such as a checkpoint or an adapter.

Belongs here: parts, digests, the manifest; choosing and removing old bundles. Does not belong here: what the parts
mean, how many are kept, and when (`loop`).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Buffer, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orbit_runtime.digests import Piece, PieceHasher, Pieces, cut, first_difference, hash_pieces
from orbit_runtime.errors import OutputError
from orbit_runtime.storage.execution import Execution
from orbit_runtime.storage.store import STREAM_BYTES, AlreadyExists, CorruptBundle, NotFound, Store

MANIFEST = "manifest.json"
_FORMAT = 2
# Other folders beside bundles are a user's, such as a copy, or a merged adapter: never the newest, nor pruned.
_FOLDER = re.compile(r"[a-z]+/(step-|policy-v)\d+/")


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a bundle. Example: `Part("checkpoints/step-000012/master-e000003.safetensors", (Piece(…), …))`"""

    key: str
    pieces: Pieces
    """Pieces of its bytes in order, as `digests` cuts them; a file of one piece has that piece's SHA-256."""

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True)
class Content:
    """The future content of a part, in pieces that are produced when needed."""

    bytes: int
    pieces: Callable[[], Iterable[Buffer]]
    """May be called more than once, as a failed attempt starts over, and must give the same pieces each time."""
    known: Pieces | None = None
    """Digests of the pieces, if they were hashed before; they are then not hashed again."""
    is_there: bool = False
    """Whether another process already wrote the part to its place: it is then only listed."""


class StoredFiles(Mapping[str, Buffer]):
    """Files in a store, each read on access. Readers that share the store can be given their keys instead."""

    def __init__(self, store: Store, parts: Mapping[str, Part]) -> None:
        self.store = store
        self.parts = parts

    def __getitem__(self, name: str) -> Buffer:
        return self.store.view(self.parts[name].key)

    def __contains__(self, name: object) -> bool:
        return name in self.parts

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def first_piece(self, name: str) -> Buffer:
        """The first piece of a file; for safetensors, the header."""
        part = self.parts[name]
        return self.store.get_range(part.key, 0, part.pieces[0].bytes)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest, which is written last and defines the bundle's parts."""

    kind: str
    execution: int
    parts: Mapping[str, Part]
    """The parts by logical name, such as `master.safetensors`."""
    facts: Mapping[str, Any]
    """Small JSON values from the writer: step, policy version, digests."""
    written: float


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle whose parts were read and verified."""

    prefix: str
    manifest: Manifest
    parts: Mapping[str, Buffer]

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.manifest.facts


def write_bundle(
    store: Store,
    execution: Execution,
    prefix: str,
    parts: Mapping[str, Buffer | Content],
    facts: Mapping[str, Any],
    *,
    kind: str = "",
    plain_names: bool = False,
) -> Manifest:
    """Write the parts, then the manifest. If killed at any point, the folder holds the old bundle, the new one or none.

    A part given as `Content` is hashed and written in one pass, with a few pieces in memory at a time.

    Safe to call twice. A bundle that a lower execution left here is replaced; that of a higher one stands.

    Args:
        prefix: the bundle's folder, such as `checkpoints/step-000012`.
        parts: by logical name; the object's name also contains the execution number.
        facts: JSON values.
        kind: `checkpoint`, `adapter` …; by default the first folder of the prefix, in the singular.
        plain_names: use the logical name as the object's name, for readers that expect it (PEFT).

    Raises:
        OutputError: another execution took over.
    """
    folder = _folder(prefix)
    keys = {name: f"{folder}{name}" if plain_names else part_key(folder, name, execution.number) for name in parts}
    contents = {keys[name]: _content(part) for name, part in parts.items()}
    kind = kind or folder.split("/")[0].removesuffix("s")
    standing = _standing(store, folder)
    if standing is not None:
        _refuse_higher(store, standing, execution)
        if _overwrites(standing, contents):
            withdraw_bundle(store, execution, folder)
            standing = None
    written = write_parts(store, contents)
    listed = {name: written[key] for name, key in keys.items()}
    manifest = Manifest(kind, execution.number, listed, dict(facts), store.clock())
    execution.check()
    _put_manifest(store, folder, manifest, execution, replace=standing is not None)
    return manifest


def restate_bundle(
    store: Store,
    execution: Execution,
    prefix: str,
    facts: Mapping[str, Any],
    parts: Mapping[str, Buffer] | None = None,
) -> None:
    """Replaces the facts of a complete bundle, and adds parts that it lacks; existing parts stay as they are.

    Raises:
        OutputError: another execution took over.
    """
    folder = _folder(prefix)
    standing = read_manifest(store, folder)
    _refuse_higher(store, standing, execution)
    execution.check()
    keys = {name: part_key(folder, name, execution.number) for name in parts or {}}
    assert not {part.key for part in standing.parts.values()} & {*keys.values()}, "a part that stands is not replaced"
    written = write_parts(store, {keys[name]: _content(part) for name, part in (parts or {}).items()})
    listed = {**standing.parts, **{name: written[key] for name, key in keys.items()}}
    manifest = replace(standing, execution=execution.number, parts=listed, facts=dict(facts), written=store.clock())
    _put_manifest(store, folder, manifest, execution, replace=True)


def standing_content(part: Part) -> Content:
    """The content of a part that another process wrote."""
    return Content(part.bytes, tuple, part.pieces, is_there=True)


def _content(part: Buffer | Content) -> Content:
    if isinstance(part, Content):
        return part
    view = memoryview(part).cast("B")
    return Content(view.nbytes, lambda: cut(view), hash_pieces(cut(view)))


def _overwrites(standing: Manifest, contents: Mapping[str, Content]) -> bool:
    """Whether an existing part will, or may, get other bytes."""
    return any(part.key in contents and contents[part.key].known != part.pieces for part in standing.parts.values())


def standing_parts(store: Store, prefix: str, execution: Execution) -> Mapping[str, Part]:
    """Parts of the existing bundle, for the caller that will rewrite it; empty if there is no readable bundle.

    Raises:
        OutputError: a higher execution wrote it.
    """
    standing = _standing(store, _folder(prefix))
    if standing is None:
        return {}
    _refuse_higher(store, standing, execution)
    return standing.parts


def withdraw_bundle(store: Store, execution: Execution, prefix: str) -> None:
    """Removes the manifest before parts are rewritten: a kill meanwhile must not leave it above new parts."""
    execution.check()
    store.delete([_folder(prefix) + MANIFEST])


def write_parts(store: Store, contents: Mapping[str, Content]) -> dict[str, Part]:
    """Writes contents by key; returns the parts. Small ones are written together, large ones one after another."""
    written, small = {}, []
    for key, content in contents.items():
        if content.is_there:
            assert content.known is not None
            written[key] = Part(key, content.known)
        elif content.bytes < STREAM_BYTES:
            pieces = [*content.pieces()]
            small.append((key, b"".join(pieces)))
            written[key] = Part(key, content.known or hash_pieces(pieces))
        else:
            written[key] = Part(key, _stream(store, key, content))
    store.put_many(small)
    return written


def _stream(store: Store, key: str, content: Content) -> Pieces:
    if content.known is not None:
        store.put_stream(key, content.pieces)
        return content.known
    hashers: list[PieceHasher] = []

    def hashed() -> Iterator[Buffer]:
        hashers.append(PieceHasher())
        for piece in content.pieces():
            hashers[-1].add(piece)
            yield piece

    store.put_stream(key, hashed)
    return hashers[-1].result()


def read_manifest(store: Store, prefix: str) -> Manifest:
    """Reads only the manifest, not the parts.

    Raises:
        NotFound: there is no complete bundle here.
        CorruptBundle: the manifest is invalid.
    """
    key = _folder(prefix) + MANIFEST
    try:
        raw = json.loads(store.get(key))
        if raw["format"] not in (1, _FORMAT):
            raise CorruptBundle(f"{key} has format {raw['format']}, this version reads {_FORMAT}", where=store.uri)
        parts = {str(name): Part(str(part["key"]), read_pieces(part)) for name, part in raw["parts"].items()}
        return Manifest(str(raw["kind"]), int(raw["execution"]), parts, dict(raw["facts"]), float(raw["written"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CorruptBundle(f"{key} is not a manifest", where=store.uri) from None


def read_pieces(part: Mapping[str, Any]) -> Pieces:
    if "sha256" in part:
        # Format 1: one SHA-256 of the whole file.
        return (Piece(int(part["bytes"]), str(part["sha256"])),)
    return tuple(Piece(int(size), str(sha256)) for size, sha256 in part["pieces"])


def read_bundle(store: Store, prefix: str, *, in_place: bool = False) -> Bundle:
    """Read a bundle and verify every part.

    Args:
        in_place: parts are `StoredFiles`: verified a few pieces at a time, and not kept in memory.

    Raises:
        NotFound: there is no complete bundle here.
        CorruptBundle: a part is missing or has another size or digest; the message names it.
    """
    folder = _folder(prefix)
    manifest = read_manifest(store, folder)
    contents: dict[str, Buffer] = {}
    foreign = [part.key for part in manifest.parts.values() if not _is_key_in(part.key, folder)]
    if foreign:
        raise CorruptBundle(f"{folder}{MANIFEST} names {foreign[0]!r}, outside of its folder", where=store.uri)
    if in_place:
        for part in manifest.parts.values():
            _verify_in_place(store, part)
        return Bundle(folder, manifest, StoredFiles(store, manifest.parts))
    found = store.view_many([part.key for part in manifest.parts.values()])
    for (name, part), data in zip(manifest.parts.items(), found, strict=True):
        if isinstance(data, NotFound):
            raise CorruptBundle(f"{part.key} is missing", where=store.uri)
        size = memoryview(data).nbytes
        if size != part.bytes:
            raise CorruptBundle(f"{part.key} has {size} bytes instead of {part.bytes}", where=store.uri)
        _check_pieces(store, part, data, part.pieces, 0)
        contents[name] = data
    return Bundle(folder, manifest, contents)


def _verify_in_place(store: Store, part: Part) -> None:
    position, size, waiting = 0, 0, list[Piece]()
    for index, piece in enumerate(part.pieces):
        waiting.append(piece)
        size += piece.bytes
        if size >= STREAM_BYTES or index == len(part.pieces) - 1:
            try:
                data = store.get_range(part.key, position, position + size) if size else b""
            except NotFound:
                raise CorruptBundle(f"{part.key} is missing", where=store.uri) from None
            if len(data) != size:
                raise CorruptBundle(
                    f"{part.key} has {position + len(data)} bytes instead of {part.bytes}", where=store.uri
                )
            _check_pieces(store, part, data, tuple(waiting), position)
            position, size, waiting = position + size, 0, []
    if store.size(part.key) != part.bytes:
        raise CorruptBundle(f"{part.key} has {store.size(part.key)} bytes instead of {part.bytes}", where=store.uri)


def _check_pieces(store: Store, part: Part, data: Buffer, pieces: Pieces, position: int) -> None:
    wrong = first_difference(data, pieces)
    if wrong is not None:
        start = position + sum(piece.bytes for piece in pieces[:wrong])
        end = start + pieces[wrong].bytes
        raise CorruptBundle(
            f"{part.key} was changed: the SHA-256 of its bytes {start} to {end} is not the manifest's",
            where=store.uri,
        )


def list_bundles(store: Store, prefix: str) -> list[str]:
    """The folders below `prefix` that have a manifest, highest number in the name first, each ending in `/`."""
    folders = filter(_FOLDER.fullmatch, (key.removesuffix(MANIFEST) for key in store.list(prefix)))
    return sorted(folders, key=bundle_order, reverse=True)


def newest_readable(store: Store, prefix: str, *, in_place: bool = False) -> tuple[Bundle | None, tuple[str, ...]]:
    """The newest bundle that verifies, or `None`, and why each newer one does not."""
    skipped: list[str] = []
    for folder in list_bundles(store, prefix):
        try:
            return read_bundle(store, folder, in_place=in_place), tuple(skipped)
        except (CorruptBundle, NotFound) as error:
            skipped.append(error.message)
    return None, tuple(skipped)


class CheckpointParts:
    """A `StateWriter` that collects the parts of a checkpoint until they are read."""

    def __init__(self, folder: str) -> None:
        """Args: folder: the checkpoint's folder."""
        self.folder = folder
        self.contents: dict[str, Content] = {}
        self.is_read = threading.Event()

    def write(self, name: str, size: int, pieces: Callable[[], Iterable[Buffer]]) -> None:
        self.contents[name] = Content(size, pieces)

    def stand(self, parts: Mapping[str, Part]) -> None:
        """Adds parts that another process wrote to the folder."""
        self.contents |= {name: standing_content(part) for name, part in parts.items()}

    def wait(self) -> None:
        self.is_read.wait()


def bundle_order(folder: str) -> list[tuple[int, str]]:
    """Sorts `policy-v9` before `policy-v12`."""
    return [(int(piece), "") if piece.isdigit() else (0, piece) for piece in re.split(r"(\d+)", folder)]


def manifest_json(manifest: Manifest) -> bytes:
    """Bytes of the manifest file. `pieces` of a part are pairs of size and SHA-256, in the order of the file."""
    parts = {
        name: {"key": part.key, "bytes": part.bytes, "pieces": [[piece.bytes, piece.sha256] for piece in part.pieces]}
        for name, part in manifest.parts.items()
    }
    content = {
        "format": _FORMAT, "kind": manifest.kind, "execution": manifest.execution, "parts": parts,
        "facts": dict(manifest.facts), "written": manifest.written,
    }  # fmt: skip
    return json.dumps(content, indent=1, allow_nan=False).encode()


def _put_manifest(store: Store, folder: str, manifest: Manifest, execution: Execution, *, replace: bool) -> None:
    data = manifest_json(manifest)
    try:
        store.put(folder + MANIFEST, data, create_only=not replace)
    except AlreadyExists:
        standing = _standing(store, folder)
        if standing is not None:
            _refuse_higher(store, standing, execution)
        store.put(folder + MANIFEST, data)


def _standing(store: Store, folder: str) -> Manifest | None:
    """The existing manifest. A broken one counts as absent, but its key must be freed."""
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


def part_key(prefix: str, name: str, execution: int) -> str:
    """Key of an execution's part of a bundle."""
    stem, dot, ending = name.partition(".")
    return f"{_folder(prefix)}{stem}-e{execution:06d}{dot}{ending}"


def _is_key_in(key: str, folder: str) -> bool:
    return key.startswith(folder) and ".." not in key.split("/")


def _folder(prefix: str) -> str:
    return f"{prefix.rstrip('/')}/"


@dataclass(frozen=True, slots=True)
class Pruning:
    """Objects to delete, in order: without its manifest a bundle no longer exists, whatever parts remain."""

    manifests: tuple[str, ...]
    parts: tuple[str, ...]


def prune_bundles(
    store: Store, prefix: str, keep: int, *, newest: str | None = None, spared: Collection[str] = ()
) -> Pruning:
    """Remove all but the newest `keep` complete bundles (0 keeps all), and parts of older unfinished ones.

    Args:
        newest: the bundle just written. Higher ones are left alone and not counted: after a fall-back, a corrupt
        checkpoint still has a higher number than the good ones, which must not be removed in its favour.
        spared: further bundles to keep.
    """
    choice = choose_pruning(store.list(prefix), keep, newest=newest, spared=spared)
    store.delete(choice.manifests)
    store.delete(choice.parts)
    return choice


def choose_pruning(
    keys: Sequence[str], keep: int, *, newest: str | None = None, spared: Collection[str] = ()
) -> Pruning:
    """The keys below a prefix to delete: never the newest complete bundle, nor anything above it. Pure."""
    bundles: dict[str, list[str]] = {}
    for key in keys:
        bundles.setdefault(key.rpartition("/")[0], []).append(key)
    order = sorted((each for each in bundles if _FOLDER.fullmatch(f"{each}/")), key=bundle_order, reverse=True)
    if newest is not None:
        limit = bundle_order(newest.rstrip("/"))
        order = [folder for folder in order if bundle_order(folder) <= limit]
    complete = [folder for folder in order if f"{folder}/{MANIFEST}" in bundles[folder]]
    if not complete:
        return Pruning((), ())
    kept = {*spared, *(complete if keep == 0 else complete[: max(keep, 1)])}
    gone = [folder for folder in order[order.index(complete[0]) :] if folder not in kept]
    gone_keys = [key for folder in gone for key in bundles[folder]]
    return Pruning(
        tuple(key for key in gone_keys if key.endswith(f"/{MANIFEST}")),
        tuple(key for key in gone_keys if not key.endswith(f"/{MANIFEST}")),
    )
