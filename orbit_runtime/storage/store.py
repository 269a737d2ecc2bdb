"""The store: bytes by key, each call retried until its deadline, each failure raised as an error with an owner.

Belongs here: put, get, list and delete. Does not belong here: URIs (`opening`), bundles, executions.
"""

from __future__ import annotations

import logging
import mmap
import re
import shutil
from collections.abc import Buffer, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from obstore.exceptions import BaseError
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_exponential_jitter

from orbit_runtime.errors import CredentialsError, OrbitError, OutputError, StorageError
from orbit_runtime.storage.faults import read_fault

_log = logging.getLogger("orbit.storage")
_KEY = re.compile(r"[A-Za-z0-9._=+-]+(/[A-Za-z0-9._=+-]+)*")
_PARALLEL_REQUESTS = 8
STREAM_BYTES = 1 << 24
"""Bytes of one request of a streamed object, and the smallest object worth streaming."""
_STREAM_REQUESTS = 2
_MAPPED_BYTES = 1 << 20

STORE_ERRORS = (BaseError, OSError)
"""Exceptions of the store and the disk; any other is a bug of ours."""

Keys = list[str]
"""An alias, as `list` is a method below."""


class NoSuchBucket(StorageError):
    """The URI names a bucket that does not exist."""


class NotFound(StorageError):
    """No object has this key."""


class AlreadyExists(StorageError):
    """A create-only put found another writer's object."""


class CorruptBundle(StorageError):
    """A bundle contradicts its manifest: a part is missing, truncated or changed, or the manifest is not JSON."""


class FolderGone(StorageError):
    """The folder no longer holds the record of the execution that writes to it."""


class Backend(Protocol):
    """The seven methods that we use of an obstore store (`LocalStore`, `S3Store`, `MemoryStore` …)."""

    def put(self, path: str, file: Any, /, *, mode: Any = None, **streaming: Any) -> Any: ...
    def get(self, path: str, /) -> Any: ...
    def get_range(self, path: str, /, *, start: int, end: int) -> Any: ...
    def head(self, path: str, /) -> Any: ...
    def list(self, prefix: str | None = None) -> Any: ...
    def list_with_delimiter(self, prefix: str | None = None) -> Any: ...
    def delete(self, paths: Sequence[str], /) -> Any: ...


class Store:
    """A run folder, or a folder of run folders. Safe to use from several threads; not after a fork.

    Args:
        backend: an obstore store whose root is `uri`.
        uri: for messages; contains no credentials.
        root: the folder on this machine, or `None` for an object store.
        deadline_seconds: how long one call may be retried before a `StorageError`; it is tried at least twice.
        clock, sleep: wall clock and waiting; `monotonic` measures the deadline.
    """

    def __init__(
        self,
        backend: Backend,
        uri: str,
        *,
        root: Path | None,
        deadline_seconds: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        monotonic: Callable[[], float],
    ) -> None:
        self.uri = uri
        self.root = root
        self.deadline_seconds = deadline_seconds
        self.clock = clock
        self.sleep = sleep
        self.monotonic = monotonic
        self.owner: tuple[str, bytes] | None = None
        """Key and bytes of the record of the execution that writes here."""
        self._backend = backend
        self._pool: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    def with_deadline(self, seconds: float) -> Store:
        """The same store with another deadline."""
        other = Store(
            self._backend,
            self.uri,
            root=self.root,
            deadline_seconds=seconds,
            clock=self.clock,
            sleep=self.sleep,
            monotonic=self.monotonic,
        )
        other.owner = self.owner
        return other

    def check_owner(self) -> None:
        """Refuses to continue in a folder that lost the record of the execution that writes here.

        Raises:
            FolderGone: the folder was removed, moved or replaced.
        """
        if self.owner is None:
            return
        key, record = self.owner
        try:
            if self.get(key) == record:
                return
        except NotFound:
            pass
        raise FolderGone(
            f"the run folder was removed, moved or replaced while the run wrote to it: its own record {key} is gone",
            where=self.uri,
            fix="put the folder back and start again to continue from its newest checkpoint; nothing was made anew",
        )

    @contextmanager
    def _in_own_folder(self, key: str) -> Iterator[None]:
        """Around a put of `key`, which would make a local folder anew that was taken away. In an object store, whose
        answers take longer, `Execution.check` asks.
        """
        if self.root is None:
            yield
            return
        self.check_owner()
        yield
        try:
            self.check_owner()
        except FolderGone:
            with suppress(OSError):
                (self.root / key).unlink()
                for folder in Path(key).parents:
                    (self.root / folder).rmdir()
            raise

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write one object, whole or not at all. Safe to call twice.

        Raises:
            AlreadyExists: with `create_only`, if another writer's object has this key.
        """
        check_key(key)
        tries = 0

        def attempt() -> None:
            nonlocal tries
            tries += 1
            self._backend.put(key, data, mode="create" if create_only else "overwrite")

        try:
            with self._in_own_folder(key):
                self._call(f"writing {key}", key, attempt)
        except AlreadyExists:
            # An earlier try may have succeeded although its answer was lost.
            if tries == 1 or self.get(key) != data:
                raise
        except NotFound:
            # A put creates missing folders, so "not found" means that nothing can be created there.
            raise self._uncreatable(key) from None

    def put_stream(self, key: str, pieces: Callable[[], Iterable[Buffer]]) -> None:
        """Write one object from its pieces, whole or not at all, with a few pieces in memory at a time.

        Args:
            pieces: called again for each try, and must give the same pieces every time.
        """
        check_key(key)

        def attempt() -> None:
            self._backend.put(
                key, iter(pieces()), use_multipart=True, chunk_size=STREAM_BYTES, max_concurrency=_STREAM_REQUESTS
            )

        try:
            with self._in_own_folder(key):
                self._call(f"writing {key}", key, attempt)
        except NotFound:
            raise self._uncreatable(key) from None

    def get(self, key: str) -> bytes:
        """Read one object. Raises `NotFound`."""
        check_key(key)
        data = self._call(f"reading {key}", key, lambda: bytes(self._backend.get(key).bytes()))
        assert isinstance(data, bytes)
        return data

    def view(self, key: str) -> Buffer:
        """Read one object as a view: in a local folder it is memory-mapped, and so takes no memory of its own.

        Writing to the view changes only the view. Raises `NotFound`.
        """
        check_key(key)
        try:
            if self.root is not None and (self.root / key).stat().st_size >= _MAPPED_BYTES:
                with (self.root / key).open("rb") as file:
                    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except OSError:
            # Whatever the failure is, the ordinary read raises it as our error.
            pass
        return self.get(key)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Read bytes `[start, end)` of one object, fewer if it ends earlier. Raises `NotFound`."""
        check_key(key)
        doing = f"reading {key}"
        data = self._call(doing, key, lambda: bytes(self._backend.get_range(key, start=start, end=end)))
        assert isinstance(data, bytes)
        return data

    def size(self, key: str) -> int:
        """Bytes of one object. Raises `NotFound`."""
        return self.version(key)[0]

    def version(self, key: str) -> tuple[int, str]:
        """Size of one object, and a text that changes if it is replaced. Raises `NotFound`."""
        check_key(key)
        found = self._call(f"looking for {key}", key, lambda: self._backend.head(key))
        return int(found["size"]), str(found.get("e_tag") or found.get("last_modified"))

    def exists(self, key: str) -> bool:
        """Whether an object has this key."""
        try:
            self.version(key)
        except NotFound:
            return False
        return True

    def list(self, prefix: str = "") -> Keys:
        """All keys below a folder, at any depth, sorted. A folder that does not exist is empty."""
        folder = _folder(prefix)

        def attempt() -> Keys:
            return [entry["path"] for page in self._backend.list(folder) for entry in page]

        keys: Keys = self._call(f"listing {prefix or 'the folder'}", prefix, attempt)
        return sorted(keys)

    def list_folders(self, prefix: str = "") -> Keys:
        """The folders directly below a folder, sorted, each ending in `/`. They may turn out to be empty."""
        folder = _folder(prefix)

        def attempt() -> Keys:
            return [f"{path.rstrip('/')}/" for path in self._backend.list_with_delimiter(folder)["common_prefixes"]]

        folders: Keys = self._call(f"listing {prefix or 'the folder'}", prefix, attempt)
        return sorted(folders)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; it is no error if they are already gone."""
        names = [*keys]
        for key in names:
            check_key(key)
        if self.root is not None:
            # LocalStore stops at the first missing file.
            for key in names:
                with suppress(NotFound):
                    self._call(f"deleting {key}", key, partial(self._backend.delete, [key]))
        elif names:
            self._call(f"deleting {len(names)} objects", names[0], lambda: self._backend.delete(names))

    def _uncreatable(self, key: str) -> OutputError:
        return OutputError(f"{key} cannot be created here", where=self.uri, fix="choose a folder that can be written")

    def put_many(self, objects: Sequence[tuple[str, bytes]]) -> None:
        """Write several objects, in parallel if each costs a round trip. On return, all are written."""
        self._each(lambda pair: self.put(pair[0], pair[1]), objects)

    def view_many(self, keys: Sequence[str]) -> Sequence[Buffer | NotFound]:
        """`view` of several objects, in the given order; a missing one is returned as its `NotFound`."""

        def read(key: str) -> Buffer | NotFound:
            try:
                return self.view(key)
            except NotFound as missing:
                return missing

        return self._each(read, keys)

    def _each[T, R](self, call: Callable[[T], R], items: Sequence[T]) -> Sequence[R]:
        if self.root is not None or len(items) < 2:
            return [call(item) for item in items]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_PARALLEL_REQUESTS, thread_name_prefix="orbit-store")
        return [*self._pool.map(call, items)]

    def sweep(self) -> None:
        """Remove files that a killed writer left half-written in a local folder. Only the single writer calls it.

        LocalStore writes `NAME#1` and renames it; listings hide such files, so nothing else ever removes them.
        """
        if self.root is None:
            return
        for path in self.root.rglob("*#*"):
            if re.fullmatch(r".+#\d+", path.name) and path.is_file():
                path.unlink(missing_ok=True)

    def _call(self, doing: str, key: str, attempt: Callable[[], Any]) -> Any:
        started = self.monotonic()

        def out_of_time(state: RetryCallState) -> bool:
            # One attempt may use up the time because this process was suspended, which says nothing about the store.
            is_late = self.monotonic() - started + state.upcoming_sleep > self.deadline_seconds
            return is_late and state.attempt_number > 1

        def tell(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            reason = read_fault(error).reason if isinstance(error, Exception) else "failed"
            _log.warning("%s in %s: %s; trying again in %.1f s", doing, self.uri, reason, state.upcoming_sleep)

        retrying = Retrying(
            retry=retry_if_exception(lambda e: isinstance(e, STORE_ERRORS) and read_fault(e).kind == "transient"),
            wait=wait_exponential_jitter(multiplier=0.1, max=8.0, jitter=0.1),
            stop=out_of_time,
            sleep=self.sleep,
            before_sleep=tell,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except STORE_ERRORS as error:
            raise self.explain(error, doing, key, seconds=self.monotonic() - started) from None

    def explain(self, error: Exception, doing: str, key: str = "", *, seconds: float = 0.0) -> OrbitError:
        """The error of a failed call, without the text of the store's own."""
        fault = read_fault(error)
        where = self.uri
        match fault.kind:
            case "missing":
                return NotFound(f"{key} is not there", where=where)
            case "exists":
                return AlreadyExists(f"{key} was already written by someone else", where=where)
            case "no-bucket":
                # The store's owner creates buckets: the operator retries, and finds the bucket once it exists.
                return NoSuchBucket(
                    "the bucket does not exist", where=where, fix="create the bucket, or correct its name in the URI"
                )
            case "bad-bucket":
                return OutputError("this is not a valid bucket name", where=where, fix="correct the bucket in the URI")
            case "refused":
                return CredentialsError(
                    f"{doing} was refused ({fault.reason})",
                    where=where,
                    fix="check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, and that this identity "
                    "may list, read, write and delete in the bucket",
                )
            case "no-credentials":
                return CredentialsError(
                    "no credentials for the object store were found",
                    where=where,
                    fix="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run under an identity that has a role",
                )
            case "clock":
                return CredentialsError(
                    "the store refused the request because this machine's clock is wrong",
                    where=where,
                    fix="synchronise the clock (NTP) and start again",
                )
            case "untrusted":
                return CredentialsError(
                    f"the certificate of the store is not trusted ({fault.reason})",
                    where=where,
                    fix="name a file with its authority in SSL_CERT_FILE (on a cluster: the chart's "
                    "`runs.caConfigMap`), or correct AWS_ENDPOINT_URL",
                )
            case "rejected":
                return OutputError(
                    f"{doing} was rejected ({fault.reason})",
                    where=where,
                    fix="check AWS_REGION, AWS_ENDPOINT_URL and the bucket; the store has to honour If-None-Match",
                )
            case "full":
                return StorageError(
                    f"{doing} failed: {fault.reason.lower()} ({self._free_space()})",
                    where=where,
                    fix="free some space or lower spec.checkpoint.keep, then start again: it continues from the newest "
                    "complete checkpoint",
                )
            case "denied":
                return OutputError(
                    f"{doing} failed: {fault.reason.lower()}",
                    where=where,
                    fix="choose a folder that this user may write, on a file system with hard links",
                )
            case "unusable":
                return OutputError(
                    f"{doing} failed: {fault.reason.lower()}",
                    where=where,
                    fix="choose another folder: a file and a folder would have the same name here",
                )
            case "impossible":
                return OutputError(
                    f"{doing} failed: {fault.reason.lower()}",
                    where=where,
                    fix="choose another folder: this file system, or a limit of this user (`ulimit -f`), allows no "
                    "such a name or file",
                )
            case "transient":
                return StorageError(
                    f"{doing} failed for {seconds:.0f} s: {fault.reason}",
                    where=where,
                    fix="check that the store is up and reachable from here, then start again: nothing durable is lost",
                )

    def _free_space(self) -> str:
        if self.root is None:
            return "the store is full"
        folder = self.root
        while not folder.exists():
            folder = folder.parent
        usage = shutil.disk_usage(folder)
        return f"{usage.free / 2**20:.1f} MiB free of {usage.total / 2**20:.1f} MiB"


def is_key(key: str) -> bool:
    """Whether a key is plain ASCII segments joined by `/`, as in every store."""
    return _KEY.fullmatch(key) is not None and ".." not in key.split("/")


def stays_inside(name: str) -> bool:
    """Whether a file of this name, which others wrote, lies in the folder that it is put in."""
    return not {"", ".", ".."} & set(name.split("/")) and "\\" not in name and "\0" not in name


def check_key(key: str) -> None:
    assert is_key(key), f"not a key: {key!r}"


def _folder(prefix: str) -> str | None:
    folder = prefix.rstrip("/")
    if folder:
        check_key(folder)
    return folder or None
