"""The download cache: finished files under their SHA-256, unfinished ones under what they will be, one lock each.

Belongs here: where a downloaded byte is kept and when it counts. Does not belong here: its source (`hub`, `inputs`), or
retries (`download`).

`blobs/<sha256>` finished files · `parts/<key>` unfinished ones · `known/<key>` SHA-256 of files that announce none ·
`folders/<digest>/` names that point at blobs · `listings/<key>.json` what a hub's revision holds, and
what passes of a small copy of a model showed · `locks/` ·
`digests/<key>` of models whose files are as they were when they were hashed · `paces/<key>` seconds of start and of a
step of runs that were measured here.
Nothing here expires: delete the folder, or any part of it, while no run starts.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from orbit_runtime.errors import OrbitError, OutputError, StorageError
from orbit_runtime.storage.filelock import LockBusyError, release_lock, take_lock

LOCK_POLL_SECONDS = 0.2


def default_cache(environ: Mapping[str, str]) -> Path:
    """`ORBIT_CACHE`, which the operator sets to the mounted cache volume; else the user's cache folder."""
    named = environ.get("ORBIT_CACHE")
    if named:
        return Path(named)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orbit-rl"


class Cache:
    """One cache folder. Any number of processes may share it."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def blob(self, sha256: str) -> Path:
        return self.root / "blobs" / sha256

    def part(self, key: str) -> Path:
        return self.root / "parts" / key

    def find(self, key: str, size: int, sha256: str | None) -> str | None:
        """SHA-256 of a file that the cache holds completely; `None` if it must be fetched."""
        if sha256 is None:
            try:
                sha256 = (self.root / "known" / key).read_text()
            except FileNotFoundError:
                return None
        try:
            return sha256 if self.blob(sha256).stat().st_size == size else None
        except FileNotFoundError:
            return None

    def keep(self, key: str, part: Path, sha256: str) -> None:
        """Turns a verified part into a blob, atomically."""
        self.blob(sha256).parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, self.blob(sha256))
        self._write("known", key, sha256)

    def load_listing(self, key: str) -> Any:
        try:
            return json.loads((self.root / "listings" / f"{key}.json").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def save_listing(self, key: str, listing: Any) -> None:
        self._write("listings", f"{key}.json", json.dumps(listing))

    def load_digest(self, key: str) -> str | None:
        try:
            return (self.root / "digests" / key).read_text() or None
        except OSError:
            return None

    def save_digest(self, key: str, digest: str) -> None:
        """Does nothing if the folder cannot be written: the digest is then computed again."""
        with suppress(OSError):
            self._write("digests", key, digest)

    def load_pace(self, key: str) -> tuple[float, float] | None:
        """Seconds of start and of a step, as measured; None if they were not."""
        with suppress(OSError, ValueError):
            start, step = map(float, (self.root / "paces" / key).read_text().split())
            return start, step
        return None

    def save_pace(self, key: str, start: float, step: float) -> None:
        """Does nothing if the folder cannot be written: how long a run takes is then unknown."""
        with suppress(OSError):
            self._write("paces", key, f"{start} {step}")

    def build_folder(self, files: Mapping[str, str]) -> tuple[Path, str]:
        """A folder with these files (name → SHA-256), and the digest of all of them."""
        digest = digest_of(files)
        target = self.root / "folders" / digest
        if all((target / name).exists() for name in files):
            return target, digest
        staging = self.root / "folders" / f".{uuid.uuid4().hex}"
        for name, sha256 in files.items():
            link = staging / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(self.blob(sha256), target / Path(name).parent))
        try:
            os.rename(staging, target)
        except OSError:
            # Another run was faster and created the same links.
            shutil.rmtree(staging)
            if not all((target / name).is_symlink() for name in files):
                raise
        return target, digest

    @contextmanager
    def lock(self, key: str, wait: Callable[[float], None]) -> Iterator[Path]:
        """A context in which only this process writes the part that it yields. `wait` sleeps, or raises to stop.

        On a file system without flock, every process writes its own part.
        """
        handle = None
        while True:
            try:
                handle = take_lock(self.root / "locks" / key)
                break
            except LockBusyError:
                wait(LOCK_POLL_SECONDS)
        part = self.part(key if handle is not None else f"{key}-{uuid.uuid4().hex}")
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            yield part
        finally:
            if handle is not None:
                release_lock(handle)

    def check_room(self, missing: int) -> None:
        """Raises StorageError (74) if this many more bytes do not fit."""
        self.root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.root).free
        if missing > free:
            raise StorageError(
                f"{missing / 2**20:.1f} MiB are to be downloaded, and {free / 2**20:.1f} MiB are free",
                where=str(self.root),
                fix="free some space, or set ORBIT_CACHE (on a cluster: spec.placement.modelCache) to a larger folder",
            )

    def explain(self, error: OSError) -> OrbitError:
        """Our error for a disk that refused."""
        reason = (error.strerror or "the disk failed").lower()
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            fix = "set ORBIT_CACHE (on a cluster: spec.placement.modelCache) to a folder that can be written"
            return OutputError(f"the download cache cannot be written: {reason}", where=str(self.root), fix=fix)
        fix = "free some space and start again: the download goes on where it stopped"
        return StorageError(f"writing the download cache failed: {reason}", where=str(self.root), fix=fix)

    def _write(self, folder: str, name: str, text: str) -> None:
        path = self.root / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.with_name(f".{uuid.uuid4().hex}")
        staging.write_text(text)
        os.replace(staging, path)


def digest_of(files: Mapping[str, str]) -> str:
    """One digest of names and contents."""
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
