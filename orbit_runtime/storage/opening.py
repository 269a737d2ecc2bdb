"""Opens the store of a URI, with the checks that are possible before anything is written.

Belongs here: URIs, environment, local folders that cannot be written. Does not belong here: reading or writing.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from orbit_runtime.errors import OutputError, UsageError
from orbit_runtime.storage.store import Backend, Store

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

DEADLINE_SECONDS = 120.0
START_DEADLINE_SECONDS = 20.0
_CLIENT: ClientConfig = {"connect_timeout": "5s", "read_timeout": "30s", "timeout": "600s"}


def open_store(
    uri: str,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
    environ: Mapping[str, str] | None = None,
    writable: bool = True,
) -> Store:
    """Open `runs/x`, `file:///srv/runs/x` or `s3://bucket/prefix`; creates nothing.

    A remote store is asked once, with a short deadline, so that a wrong bucket or an unavailable store shows now.
    `ORBIT_STORE_DEADLINE_SECONDS` sets how long each later call may be retried.

    Args:
        environ: holds settings and credentials; the process's own environment by default.
        writable: refuse a local folder that cannot be written. Readers of a finished run pass `False`.

    Raises:
        OutputError: the folder cannot be written, a file is in its place, or the bucket's name is invalid.
        CredentialsError: the store refused the credentials, or there are none.
        StorageError: the store did not answer, or lacks the bucket.
    """
    environ = os.environ if environ is None else environ
    deadline = read_deadline(environ)
    scheme = urlsplit(uri).scheme if "://" in uri else ""
    if scheme in ("", "file"):
        root = _local_root(uri)
        if writable:
            check_writable(root)
        return Store(
            LocalFolder(root),
            str(root),
            root=root,
            deadline_seconds=deadline,
            clock=clock,
            sleep=sleep,
            monotonic=monotonic,
        )
    store = Store(
        _remote(uri, scheme, environ),
        uri.rstrip("/"),
        root=None,
        deadline_seconds=deadline,
        clock=clock,
        sleep=sleep,
        monotonic=monotonic,
    )
    store.with_deadline(min(START_DEADLINE_SECONDS, deadline)).list("executions/")
    return store


def read_deadline(environ: Mapping[str, str]) -> float:
    """`ORBIT_STORE_DEADLINE_SECONDS`, or 120."""
    text = environ.get("ORBIT_STORE_DEADLINE_SECONDS", "")
    if not text:
        return DEADLINE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(
            f"{text!r} is not a number of seconds",
            where="ORBIT_STORE_DEADLINE_SECONDS",
            fix=f"set a number such as {DEADLINE_SECONDS:.0f}, or unset it",
        )
    return seconds


def check_writable(root: Path) -> None:
    """Refuse a folder that could not be created or written, without creating it."""
    existing = root
    try:
        while not existing.exists():
            existing = existing.parent
    except OSError as error:
        # A folder on the way that this user may not look into, or a name that is too long.
        raise OutputError(
            f"{(error.strerror or str(error)).lower()}: {existing}",
            where=str(root),
            fix="choose a folder that this user may write",
        ) from None
    if not existing.is_dir():
        raise OutputError(f"{existing} is a file, not a folder", where=str(root), fix="choose another folder")
    try:
        # Asking for the permission would not be told of a folder that cannot change, or of another machine's rules.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # Space can be made while the store tries again.
        reason = "" if isinstance(error, FileNotFoundError) else f": {error.strerror}"
        raise OutputError(
            f"this user may not write in {existing}{reason}",
            where=str(root),
            fix="choose a folder that this user may write",
        ) from None


class LocalFolder:
    """A `LocalStore` whose root folder appears with the first object. Until then it is empty."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._opened: Backend | None = None

    def put(self, path: str, file: Any, /, *, mode: Any = None, **streaming: Any) -> Any:
        return self._open(create=True).put(path, file, mode=mode, **streaming)

    def get(self, path: str, /) -> Any:
        return self._open().get(path)

    def get_range(self, path: str, /, *, start: int, end: int) -> Any:
        return self._open().get_range(path, start=start, end=end)

    def head(self, path: str, /) -> Any:
        return self._open().head(path)

    def list(self, prefix: str | None = None) -> Any:
        return self._open().list(prefix) if self._root.is_dir() else []

    def list_with_delimiter(self, prefix: str | None = None) -> Any:
        nothing: dict[str, list[Any]] = {"common_prefixes": [], "objects": []}
        return self._open().list_with_delimiter(prefix) if self._root.is_dir() else nothing

    def delete(self, paths: Sequence[str], /) -> Any:
        return self._open().delete(paths)

    def _open(self, *, create: bool = False) -> Backend:
        if self._opened is None:
            if create:
                self._root.mkdir(parents=True, exist_ok=True)
            elif not self._root.is_dir():
                raise FileNotFoundError(str(self._root))
            self._opened = cast(Backend, LocalStore(self._root, automatic_cleanup=True))
        return self._opened


def _local_root(uri: str) -> Path:
    if not uri:
        raise UsageError("the folder has no name", fix="give a path or an s3:// URI")
    if not uri.startswith("file:"):
        # A shell leaves `--out=~/runs` as it is, and a manifest has no shell.
        with suppress(RuntimeError):  # Nobody is called so: a folder may be.
            return Path(uri).expanduser().absolute()
        return Path(uri).absolute()
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise UsageError("this names no local folder", where=uri, fix="write file:///absolute/path")
    return Path(unquote(parts.path)).absolute()


def _remote(uri: str, scheme: str, environ: Mapping[str, str]) -> Backend:
    parts = urlsplit(uri)
    if parts.username or parts.password or parts.query:
        raise UsageError(
            f"a {scheme}:// URI holds a bucket and a path, nothing else",
            where=f"{scheme}://{parts.hostname or ''}{parts.path}",
            fix="give credentials in environment variables",
        )
    if not parts.netloc:
        raise UsageError("this names no bucket", where=uri, fix=f"write {scheme}://bucket/path")
    prefix = parts.path.strip("/") or None
    retry: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
    if scheme == "s3":
        client = _CLIENT.copy()
        endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or None
        if endpoint is not None and endpoint.startswith("http://"):
            client["allow_http"] = True
        place: S3Config = {"endpoint": endpoint} if endpoint else {}
        s3 = S3Store(parts.netloc, prefix=prefix, config=place, client_options=client, retry_config=retry)
        return cast(Backend, s3)
    if scheme == "gs":
        return cast(Backend, GCSStore(parts.netloc, prefix=prefix, client_options=_CLIENT, retry_config=retry))
    if scheme == "az":
        return cast(Backend, AzureStore(parts.netloc, prefix=prefix, client_options=_CLIENT, retry_config=retry))
    from orbit_runtime.spec.storage import STORAGE_SCHEMES

    *others, last = (f"{each}://" for each in STORAGE_SCHEMES)
    raise UsageError(
        f"{scheme}:// is not a kind of store that Orbit knows",
        where=uri,
        fix=f"use a path, {', '.join(others)} or {last}",
    )
