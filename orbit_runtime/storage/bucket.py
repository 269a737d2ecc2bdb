"""Files of an object store as a source of downloads.

Belongs here: listing and reading by range, and noticing that an object was replaced meanwhile. Does not belong here:
retries of one call (`store`), or the cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from orbit_runtime.errors import OutputError, StorageError, UsageError
from orbit_runtime.storage.download import MissingError, Patience, RemoteFile
from orbit_runtime.storage.opening import open_store
from orbit_runtime.storage.store import NoSuchBucket, NotFound, Store, is_key

RANGE_BYTES = 8 * 2**20
"""Bytes per request, and so the most that one lost connection costs."""
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class Bucket:
    """One folder of an object store. Example: `Bucket("s3://bucket/models/tiny", missing, patience)`"""

    def __init__(
        self, uri: str, missing: MissingError, patience: Patience, environ: Mapping[str, str] | None = None
    ) -> None:
        self.uri = self.identity = uri.rstrip("/")
        self._missing = missing
        try:
            self._store: Store = open_store(
                uri, writable=False, environ=environ, sleep=patience.sleep, monotonic=patience.monotonic
            )
        except (OutputError, UsageError, NoSuchBucket) as error:
            raise missing(error.message) from None

    def list(self) -> Sequence[str]:
        """Names of all objects below the folder, at any depth, including those that `describe` refuses."""
        return self._store.list()

    def describe(self, name: str) -> RemoteFile:
        """Size and ETag of an object."""
        if not is_key(name):
            raise self._missing(f"{name!r} has a name that not every store can hold: use letters, digits and ._=+-")
        try:
            size, etag = self._store.version(name)
        except NotFound:
            raise self._missing(f"{name} is not there") from None
        md5 = _MD5.fullmatch(etag)
        return RemoteFile(name, size, etag, likely_md5=md5[1] if md5 else None)

    def read(self, file: RemoteFile, start: int) -> tuple[int, Iterator[bytes]]:
        return start, self._ranges(file, start)

    def check_unchanged(self, file: RemoteFile) -> None:
        if self.describe(file.name) != file:
            raise StorageError(
                f"{file.name} was replaced while it was downloaded",
                where=self.uri,
                fix="start again when nothing writes there any more",
            )

    def _ranges(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        while start < file.size:
            try:
                chunk = self._store.get_range(file.name, start, min(start + RANGE_BYTES, file.size))
            except NotFound:
                raise self._missing(f"{file.name} is not there any more") from None
            if not chunk:
                return
            yield chunk
            start += len(chunk)
