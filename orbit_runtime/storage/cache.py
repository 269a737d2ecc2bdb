"""The cache of what was downloaded or made, and downloads into it: resumed, verified, several files at a time.

Belongs here: retries, digests, the meter; where a downloaded byte is kept and when it counts. Does not belong here: a
source's protocol (`hub`, `inputs`), or which files a run needs (`inputs`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from orbit_runtime.errors import OrbitError, OutputError, StoppedOnRequest, StorageError
from orbit_runtime.storage.filelock import LockBusyError, release_lock, take_lock

PARALLEL_FILES = 4
READ_BYTES = 2**20
TELL_SECONDS = 1.0
MAX_PAUSE_SECONDS = 8.0
UNREACHED_SECONDS = 30.0
"""Seconds for which a source that never answered is tried, if no byte of a download has arrived."""
QUIET_TRIES = 4
"""Consecutive tries without a new byte after which the user is notified."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """Example: `RemoteFile("config.json", 612, "9f2c…", git_sha1="9f2c…")`"""

    name: str
    size: int
    version: str
    """Changes with the content: a digest or an ETag."""
    sha256: str | None = None
    git_sha1: str | None = None
    """Git's hash of this content, for files that the hub keeps in git itself."""
    likely_md5: str | None = None
    """An object store's ETag in the form of an MD5, which it is unless the server encrypts objects."""


class MissingError(Protocol):
    """Makes the error for something that does not exist."""

    def __call__(self, message: str, *, fix: str | None = None) -> OrbitError: ...


class InterruptedTransfer(Exception):
    """A failure worth another try. Example: `InterruptedTransfer("503", wait=2.0)`"""

    def __init__(self, reason: str, *, wait: float | None = None, reached: bool = True) -> None:
        """
        Args:
            wait: seconds that the source asks to wait.
            reached: whether the source answered at all.
        """
        super().__init__(reason)
        self.reason = reason
        self.wait = wait
        self.reached = reached


class Source(Protocol):
    """A source of files."""

    uri: str
    """The address in messages; contains no credentials."""
    identity: str
    """Together with `RemoteFile.version`, identifies the content."""

    def read(self, file: RemoteFile, start: int) -> tuple[int, Iterator[bytes]]:
        """The offset at which the bytes start, and the bytes. It is `start` unless the source cannot start there.

        Raises:
            InterruptedTransfer: immediately, or while the bytes are read.
        """

    def check_unchanged(self, file: RemoteFile) -> None:
        """Raises OrbitError if the file was replaced while it was read."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Progress of a download. Example: `Transfer("hf://org/name", 1200, 3400, 12.0)`"""

    what: str
    done: int
    total: int
    seconds_left: float | None


@dataclass(frozen=True)
class RetryPolicy:
    """Limits of retrying, and whom to notify."""

    deadline_seconds: float = 120.0
    """Seconds without a new byte before a StorageError."""
    silent_seconds: float = 15.0
    """Seconds for which one request waits for a byte."""
    tell: Callable[[Transfer], None] = lambda _: None
    notice: Callable[[str], None] = lambda _: None
    """Called with messages for the user about failures that are retried."""
    stop: Callable[[], bool] = lambda: False
    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic


def fetch_files(
    source: Source,
    files: Sequence[RemoteFile],
    cache: Cache,
    patience: RetryPolicy,
    broken: Callable[[str, str], OrbitError],
) -> dict[str, str]:
    """Fetches files into the cache; returns name → SHA-256. Files already in the cache are not requested again.

    Args:
        broken: makes, from message and file name, the error for content that differs from what the source announced.

    Raises:
        StorageError: (74) the source stayed silent, or the disk is full. Received bytes are kept for the next start.
        StoppedOnRequest: (75) `patience.stop` requested it.
    """
    try:
        found = {file.name: cache.find(key_of(source, file), file.size, file.sha256) for file in files}
        missing = [file for file in files if found[file.name] is None]
        if missing:
            waiting = sum(max(0, file.size - _size(cache.part(key_of(source, file)))) for file in missing)
            cache.check_room(waiting)
            found |= _fetch_missing(source, missing, cache, patience, broken)
    except OSError as error:
        raise cache.explain(error) from None
    return {name: sha256 for name, sha256 in found.items() if sha256 is not None}


def key_of(source: Source, file: RemoteFile) -> str:
    """The key of a file in the cache before its digest is known."""
    if file.sha256 is not None:
        return file.sha256
    return hashlib.sha256(f"{source.identity}\n{file.name}\n{file.version}\n{file.size}".encode()).hexdigest()


def _fetch_missing(
    source: Source,
    files: Sequence[RemoteFile],
    cache: Cache,
    patience: RetryPolicy,
    broken: Callable[[str, str], OrbitError],
) -> dict[str, str]:
    meter = _Meter(source.uri, sum(file.size for file in files), patience.monotonic)
    with ThreadPoolExecutor(PARALLEL_FILES, thread_name_prefix="orbit-download") as pool:
        fetchers = [_Fetcher(source, file, cache, patience, broken, meter) for file in files]
        futures: list[Future[str]] = [pool.submit(fetcher.run) for fetcher in fetchers]
        try:
            pending = set(futures)
            while pending:
                done, pending = wait(pending, TELL_SECONDS, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                patience.tell(meter.reading())
                if patience.stop():
                    raise StoppedOnRequest(
                        "stopped while downloading; the same command continues where it stopped", where=source.uri
                    )
        finally:
            meter.ended.set()
            for future in futures:
                future.cancel()
    return {file.name: future.result() for file, future in zip(files, futures, strict=True)}


class _Ended(Exception):
    """Another file failed, or the run must stop."""


class _Meter:
    """Counts the bytes of all files together. Safe to use from several threads."""

    def __init__(self, what: str, total: int, monotonic: Callable[[], float]) -> None:
        self.ended = threading.Event()
        self._what, self._total, self._monotonic = what, total, monotonic
        self._lock = threading.Lock()
        self._done = self._received = 0
        self._started = monotonic()

    def add(self, count: int, *, received: bool) -> None:
        with self._lock:
            self._done += count
            self._received += count if received else 0

    def has_received(self) -> bool:
        """Whether a byte of any file has come."""
        with self._lock:
            return self._received > 0

    def reading(self) -> Transfer:
        with self._lock:
            seconds = self._monotonic() - self._started
            left = (self._total - self._done) * seconds / self._received if self._received else None
            return Transfer(self._what, self._done, self._total, left)


class _Fetcher:
    """Fetches one file."""

    def __init__(
        self,
        source: Source,
        file: RemoteFile,
        cache: Cache,
        patience: RetryPolicy,
        broken: Callable[[str, str], OrbitError],
        meter: _Meter,
    ) -> None:
        self._source, self._file, self._cache, self._patience = source, file, cache, patience
        self._broken, self._meter = broken, meter
        self._counted = 0

    def run(self) -> str:
        file, key = self._file, key_of(self._source, self._file)
        with self._cache.lock(key, self._pause) as part:
            # The previous holder of the lock may have fetched it.
            found = self._cache.find(key, file.size, file.sha256)
            if found is not None:
                self._count(file.size)
                return found
            before: str | None = None
            while True:
                self._fill(part)
                sha256, problem = self._verify(part)
                # The same bytes came twice, so the ETag only looks like an MD5.
                is_same = sha256 == before and _size(part) == file.size
                if problem is None or (file.likely_md5 is not None and is_same):
                    self._source.check_unchanged(file)
                    self._cache.keep(key, part, sha256)
                    return sha256
                part.unlink()
                if before is not None:
                    raise self._broken(problem, file.name)
                # A part from an earlier start may be the cause: start over once from the first byte.
                before = sha256

    def _fill(self, part: Path) -> None:
        """Reads until the part has the file's size; each byte that arrives restarts the clock."""
        last_byte, tries = self._patience.monotonic(), 0
        if not part.exists():
            part.touch()
        while (before := _size(part)) < self._file.size:
            try:
                self._append(part, before)
                reason, wanted, reached = f"it ended after {_size(part)} of {self._file.size} bytes", None, True
            except InterruptedTransfer as cut:
                reason, wanted, reached = cut.reason, cut.wait, cut.reached
            now = self._patience.monotonic()
            if _size(part) > before:
                last_byte, tries = now, 0
            if _size(part) >= self._file.size:
                return
            pause = min(MAX_PAUSE_SECONDS, 0.1 * 2**tries) if wanted is None else wanted
            tries += 1
            is_unreached = not (reached or self._meter.has_received())
            if tries >= QUIET_TRIES or is_unreached:
                self._patience.notice(f"{self._file.name}: {reason} (try {tries}); next in {pause:.0f} s")
            # One try may use up the time because this process was suspended: time counts from the second try.
            waited = now - last_byte if tries > 1 else 0.0
            deadline = self._patience.deadline_seconds
            if waited + pause > (min(UNREACHED_SECONDS, deadline) if is_unreached else deadline):
                raise StorageError(
                    f"downloading {self._file.name} failed for {now - last_byte:.0f} s: {reason}",
                    where=self._source.uri,
                    fix="check that the source is reachable from here, then start again: "
                    "the download goes on where it stopped",
                )
            self._pause(pause)

    def _append(self, part: Path, start: int) -> None:
        offset, chunks = self._source.read(self._file, start)
        with part.open("r+b") as stream:
            stream.truncate(offset)
            stream.seek(offset)
            self._count(offset, received=False)
            for chunk in chunks:
                stream.write(chunk)
                self._count(stream.tell())
                if self._meter.ended.is_set():
                    raise _Ended
                if stream.tell() > self._file.size:
                    return

    def _verify(self, part: Path) -> tuple[str, str | None]:
        """SHA-256 of the part, and what is wrong with it."""
        file, size = self._file, _size(part)
        sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        md5 = hashlib.md5(usedforsecurity=False)
        with part.open("rb") as stream:
            while chunk := stream.read(READ_BYTES):
                sha256.update(chunk)
                if file.git_sha1 is not None:
                    git.update(chunk)
                if file.likely_md5 is not None:
                    md5.update(chunk)
                if self._meter.ended.is_set():
                    raise _Ended
            os.fsync(stream.fileno())
        found = sha256.hexdigest()
        if size != file.size:
            return found, f"{size} bytes came instead of {file.size}"
        if file.sha256 not in (None, found):
            return found, f"its SHA-256 is {found[:12]}…, not the announced {str(file.sha256)[:12]}…"
        if file.git_sha1 not in (None, git.hexdigest()):
            return found, f"its git digest is {git.hexdigest()[:12]}…, not the announced {str(file.git_sha1)[:12]}…"
        if file.likely_md5 not in (None, md5.hexdigest()):
            return found, f"its MD5 is {md5.hexdigest()[:12]}…, its ETag {str(file.likely_md5)[:12]}…"
        return found, None

    def _count(self, done: int, *, received: bool = True) -> None:
        self._meter.add(done - self._counted, received=received)
        self._counted = done

    def _pause(self, seconds: float) -> None:
        if self._meter.ended.is_set():
            raise _Ended
        self._patience.sleep(seconds)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


LOCK_POLL_SECONDS = 0.2


def default_cache(environ: Mapping[str, str]) -> Path:
    """`ORBIT_CACHE`, which the operator sets to the mounted cache volume; else the user's cache folder."""
    named = environ.get("ORBIT_CACHE")
    return Path(named) if named else Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orbit-rl"


class Cache:
    """One cache folder: finished files under their SHA-256, unfinished ones under what they will be, one lock each. Any
    number of processes may share it.

    `blobs/<sha256>` finished files · `parts/<key>` unfinished ones · `known/<key>` SHA-256 of files that announce
    none · `folders/<digest>/` names that point at blobs · `listings/<key>.json` what a hub's revision holds, and
    what passes of a small copy of a model showed · `locks/` ·
    `digests/<key>` of models whose files are as they were when they were hashed · `paces/<key>` seconds of start and of
    a step of runs that were measured here.
    Nothing here expires: delete the folder, or any part of it, while no run starts.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def blob(self, sha256: str) -> Path:
        return self.root / "blobs" / sha256

    def part(self, key: str) -> Path:
        return self.root / "parts" / key

    def find(self, key: str, size: int, sha256: str | None) -> str | None:
        """SHA-256 of a file that the cache holds completely; `None` if it must be fetched."""
        with suppress(FileNotFoundError):
            sha256 = sha256 or (self.root / "known" / key).read_text()
            if self.blob(sha256).stat().st_size == size:
                return sha256
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
