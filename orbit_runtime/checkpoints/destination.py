"""The folder into which a checkpoint is written: writing can be resumed, and only the last file completes it.

Order: shards (each named only once complete), other files, `conversion.json` with every digest, config.json. Until
config.json exists, `conversion.progress.json` does, with which Orbit refuses to read the folder; other readers find no
config.json.

Belongs here: files, digests, restarts, a single writer. Does not belong here: the shards' contents (`rewrite`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orbit_runtime.errors import OutputError, StorageError
from orbit_runtime.model_info.settings import UNFINISHED
from orbit_runtime.storage.filelock import LockBusyError, release_lock, take_lock

MANIFEST = "conversion.json"
LOCK = "conversion.lock"
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".part")
# Those that describe the source's own weights, such as the manifest of a run's model, and those written here.
OWN_FILES = (
    "config.json", "hf_quant_config.json", "model.safetensors.index.json", "manifest.json", MANIFEST, LOCK, UNFINISHED,
)  # fmt: skip
SPARE_BYTES = 1 << 20


@dataclass
class Destination:
    """The folder of one conversion. Enter it with `opened`."""

    folder: Path
    identity: str
    """Digest of everything that determines the result: another digest means another conversion."""
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Shard → `sha256`, `bytes` and the deviations of its modules."""
    finished: Mapping[str, Any] | None = None
    """The manifest, if an earlier start finished the conversion."""

    def is_done(self, shard: str) -> bool:
        """Whether an earlier start wrote this file, byte for byte."""
        entry, path = self.done.get(shard), self.folder / shard
        return (
            entry is not None
            and path.is_file()
            and path.stat().st_size == entry["bytes"]
            and file_digest(path) == entry["sha256"]
        )

    def keep_shard(self, shard: str, modules: Mapping[str, Any]) -> None:
        path = self.folder / shard
        self.done[shard] = {"sha256": file_digest(path), "bytes": path.stat().st_size, "modules": dict(modules)}
        self._write(UNFINISHED, {"identity": self.identity, "done": self.done})

    def check_room(self, num_bytes: int) -> None:
        """Raises `StorageError` if the disk cannot hold what remains to be written."""
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes + SPARE_BYTES:
            raise _full(self.folder, f"{num_bytes / 2**20:,.1f} MiB are still to be written, {free / 2**20:,.1f} free")

    def finish(
        self, source: Path, config: Mapping[str, Any], index: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> None:
        """Writes everything but the shards; config.json last."""
        if len(self.done) > 1:
            self._write("model.safetensors.index.json", index)
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name not in OWN_FILES and path.suffix not in NOT_COPIED:
                shutil.copyfile(path, self.folder / path.name)
        data = _encode(config)
        files = {
            path.name: {"sha256": file_digest(path), "bytes": path.stat().st_size}
            for path in sorted(self.folder.iterdir())
            if path.is_file() and path.name not in (LOCK, UNFINISHED, MANIFEST) and path.suffix != ".part"
        }
        files["config.json"] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        self._write(MANIFEST, {"format": 1, "identity": self.identity, "files": files, **facts})
        self._write("config.json", config)
        (self.folder / UNFINISHED).unlink(missing_ok=True)

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        part = self.folder / f"{name}.part"
        part.write_bytes(_encode(value))
        part.replace(self.folder / name)


@contextmanager
def opened(folder: Path, identity: str) -> Iterator[Destination]:
    """The folder, locked, with what an earlier start of the same conversion left in it.

    Raises:
        OutputError: the folder cannot be created, holds something else, or another process is writing into it.
        StorageError: the disk is full.
    """
    with _translated(folder):
        folder.mkdir(parents=True, exist_ok=True)
        foreign = [path.name for path in folder.iterdir() if path.name != LOCK]
        progress, finished = _read(folder / UNFINISHED), _read(folder / MANIFEST)
        before = (progress or finished or {}).get("identity")
        if foreign and before != identity:
            what = "another conversion" if before else f"{foreign[0]} and {len(foreign) - 1} more files"
            raise OutputError(f"the folder holds {what}", where=str(folder), fix="name a new folder, or empty this one")
        try:
            lock = take_lock(folder / LOCK)
        except LockBusyError:
            raise OutputError("another process writes into this folder", where=str(folder), fix="wait for it") from None
        try:
            for part in folder.glob("*.part"):
                part.unlink()
            destination = Destination(folder, identity)
            if finished is not None and (folder / "config.json").is_file():
                (folder / UNFINISHED).unlink(missing_ok=True)
                destination.finished = finished
            else:
                destination.done = dict((progress or {}).get("done", {}))
                destination._write(UNFINISHED, {"identity": identity, "done": destination.done})
            yield destination
        finally:
            if lock is not None:
                release_lock(lock)
            if destination.finished is not None or (folder / "config.json").is_file():
                (folder / LOCK).unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """Turns a disk's errors into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(folder, "no space is left") from error
        place = str(error.filename or folder)
        raise OutputError(f"cannot be written: {error.strerror}", where=place, fix="choose another folder") from error


def _full(folder: Path, message: str) -> StorageError:
    return StorageError(
        f"the disk is full: {message}", where=str(folder), fix="free some space and give the same command: it continues"
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _encode(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + os.linesep).encode()
