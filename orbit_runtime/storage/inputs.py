"""Inputs of a manifest, wherever they are stored: turns a URI into a local path.

Belongs here: schemes, which files of a source a run needs, and an object store as a source: listing, reading by range,
noticing that an object was replaced meanwhile. Does not belong here: `builtin://` (`model_info`, `data`), the protocol
of the Hub (`hub`), retries of one call (`store`), the cache.

A model is its `*.safetensors` files and the text files beside them. Pickled weights and a model's own code are never
fetched.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from orbit_runtime.errors import DataError, ModelError, OrbitError, OutputError, StorageError, UsageError
from orbit_runtime.spec.hub_address import MODEL_FORM, PROMPTS_FORM, parse_address
from orbit_runtime.storage.cache import (
    Cache,
    MissingError,
    RemoteFile,
    RetryPolicy,
    Source,
    default_cache,
    digest_of,
    fetch_files,
)
from orbit_runtime.storage.opening import open_store, read_deadline
from orbit_runtime.storage.store import NoSuchBucket, NotFound, Store, is_key

RANGE_BYTES = 8 * 2**20
"""Bytes per request, and so the most that one lost connection costs."""
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class BucketFolder:
    """One folder of an object store. Example: `BucketFolder("s3://bucket/models/tiny", missing, patience)`"""

    def __init__(
        self, uri: str, missing: MissingError, patience: RetryPolicy, environ: Mapping[str, str] | None = None
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


Kind = Literal["model", "prompts", "code"]
INDEX, SINGLE, WEIGHTS = "model.safetensors.index.json", "model.safetensors", ".safetensors"
ARCHIVE = ".zip"
"""Python imports directly from an archive, so nothing is ever unpacked."""
MAX_CODE_FILES = 10_000
_ON_A_CLUSTER = ("pvc", "configmap")
_TEXTS = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_DATA = (".jsonl", ".ndjson", ".csv", ".parquet", ".pq", ".arrow", ".feather")
_DATA_TEXTS = ("state.json", "dataset_dict.json")
_ERRORS: dict[Kind, type[OrbitError]] = {"model": ModelError, "prompts": DataError, "code": UsageError}


@dataclass(frozen=True, slots=True)
class FetchedInput:
    """A local copy of an input."""

    path: Path
    """A folder; for prompts and code, possibly a file."""
    uri: str
    revision: str | None = None
    """The commit on the hub."""
    digest: str | None = None
    """SHA-256 over names and contents, if the input was fetched or is code."""

    def to_json(self) -> dict[str, str | None]:
        return {"uri": self.uri, "revision": self.revision, "digest": self.digest}


def fetch_input(
    uri: str,
    kind: Kind,
    where: str,
    *,
    patience: RetryPolicy | None = None,
    environ: Mapping[str, str] | None = None,
    revision: str | None = None,
) -> FetchedInput:
    """The local folder or file of a URI, downloaded if necessary.

    Args:
        where: the manifest's field, for messages.
        environ: holds settings and credentials; the process's own environment by default.
        revision: the commit on the hub that an earlier start of the same run used.

    Raises:
        ModelError, DataError, UsageError: (66, 65, 64 by kind) the input is missing, or not what its source announced.
        CredentialsError: (77) the source refused.
        StorageError: (74) the source or the disk failed.
        StoppedOnRequest: (75) stopped; received bytes are kept.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file":
        path = Path(rest if separator else uri)
        return FetchedInput(path, uri, digest=code_digest(path, where) if kind == "code" else None)
    if scheme in _ON_A_CLUSTER:
        raise _ERRORS[kind](
            f"{scheme}:// is mounted by the operator, but this run was started by hand",
            where=where,
            fix="write the path at which it is mounted here",
        )
    environ = os.environ if environ is None else environ
    wanted = _Wanted(uri, kind, where, Cache(default_cache(environ)), patience or RetryPolicy(read_deadline(environ)))
    try:
        if scheme == "s3":
            return wanted.from_bucket(environ)
        if scheme == "hf" and kind != "code":
            return wanted.from_hub(environ, revision)
    except OSError as error:
        raise wanted.cache.explain(error) from None
    raise _ERRORS[kind](f"{scheme}:// is not read here", where=where, fix="use a path, file:// or s3://")


def code_digest(path: Path, where: str) -> str:
    """SHA-256 over the names and contents of a folder of code, or of an archive.

    Hidden and compiled files do not count, so that a folder has the same digest as its copy in a bucket.

    Raises:
        UsageError: the folder does not exist, is empty, or holds far too much to be code.
    """
    if path.is_file() and path.suffix == ARCHIVE:
        return f"sha256:{digest_of({path.name: hashlib.sha256(path.read_bytes()).hexdigest()})}"
    if not path.is_dir():
        raise UsageError(f"there is neither a folder nor a {ARCHIVE} file {path}", where=where, fix=f"correct {where}")
    files: dict[str, str] = {}
    found = [*islice(_code_files(path), MAX_CODE_FILES + 1)]
    if len(found) > MAX_CODE_FILES:
        raise UsageError(f"more than {MAX_CODE_FILES} files", where=where, fix="give the code a folder of its own")
    for each in sorted(found):
        files[each.relative_to(path).as_posix()] = hashlib.sha256(each.read_bytes()).hexdigest()
    if not files:
        raise UsageError(f"the folder {path} is empty", where=where, fix=f"correct {where}")
    return f"sha256:{digest_of(files)}"


def _code_files(path: Path) -> Iterator[Path]:
    for folder, folders, files in path.walk():
        # A ConfigMap's volume contains its files a second time below `..data`.
        folders[:] = [name for name in folders if not _is_passed_over(name)]
        yield from (folder / name for name in files if not _is_passed_over(name) and (folder / name).is_file())


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One wanted input, with the facts for its errors."""

    uri: str
    kind: Kind
    where: str
    cache: Cache
    patience: RetryPolicy

    def missing(self, message: str, *, fix: str | None = None) -> OrbitError:
        return _ERRORS[self.kind](f"{self.uri}: {message}", where=self.where, fix=fix or f"correct {self.where}")

    def broken(self, message: str, name: str) -> OrbitError:
        fix = "start again; if it stays so, its source is corrupt"
        return _ERRORS[self.kind](f"{self.uri}: {name} arrived damaged, twice: {message}", where=self.where, fix=fix)

    def from_hub(self, environ: Mapping[str, str], revision: str | None) -> FetchedInput:
        from orbit_runtime.storage.hub import Hub, read_access

        address = parse_address(self.uri)
        if address is None or (self.kind == "prompts") != (address.path is not None):
            form = PROMPTS_FORM if self.kind == "prompts" else MODEL_FORM
            raise self.missing("this is not an address on the hub", fix=f"write {form}")
        access, missing = read_access(environ), self.missing
        with Hub(self.uri, access, self.patience, missing, cache=self.cache, revision=revision) as hub:
            listed = {file.name: file for file in hub.files()}
            if self.kind == "model":
                return self._keep_model(hub, listed, hub.revision)
            assert address.path is not None
            if address.path in listed:
                return self._keep(hub, [listed[address.path]], hub.revision)
            folder = address.path.rstrip("/")
            files = [file for name, file in listed.items() if name.startswith(f"{folder}/") and _is_data(name)]
            if not files:
                raise self.missing(f"the repository has no file {address.path!r}, nor a folder of that name with rows")
            return self._keep(hub, files, hub.revision, folder=folder)

    def from_bucket(self, environ: Mapping[str, str]) -> FetchedInput:
        if self.kind == "prompts" and self.uri.endswith("/"):
            bucket = BucketFolder(self.uri.rstrip("/"), self.missing, self.patience, environ)
            names = [name for name in bucket.list() if is_key(name) and _is_data(name)]
            if not names:
                raise self.missing("no file of rows is there")
            return self._keep(bucket, [bucket.describe(name) for name in names], folder="")
        if self.kind == "prompts" or (self.kind == "code" and self.uri.endswith(ARCHIVE)):
            folder, _, name = self.uri.rpartition("/")
            if not name or folder in ("s3:/", "s3:"):
                raise self.missing("this names no object", fix="write s3://bucket/folder/file")
            bucket = BucketFolder(folder, self.missing, self.patience, environ)
            return self._keep(bucket, [bucket.describe(name)])
        bucket = BucketFolder(self.uri, self.missing, self.patience, environ)
        if self.kind == "code":
            names = [name for name in bucket.list() if not _is_passed_over(name)]
            if not names or len(names) > MAX_CODE_FILES:
                raise self.missing(f"{len(names)} files are there; code is 1 to {MAX_CODE_FILES}")
            return self._keep(bucket, [bucket.describe(name) for name in names])
        names = [name for name in bucket.list() if is_key(name) and (_is_text(name) or name.endswith(WEIGHTS))]
        return self._keep_model(bucket, {name: bucket.describe(name) for name in names}, None)

    def _keep_model(self, source: Source, listed: Mapping[str, RemoteFile], revision: str | None) -> FetchedInput:
        """Fetches text files first: the index among them lists the weights."""
        if "config.json" not in listed:
            raise self.missing("there is no config.json: this is not a model in Hugging Face format")
        texts = [file for name, file in listed.items() if _is_text(name)]
        found = fetch_files(source, texts, self.cache, self.patience, self.broken)
        shards = self._shards(found)
        if SINGLE in listed and SINGLE not in shards:
            # Beside the files of an index: who reads the folder says which of both is the model.
            shards = [*(name for name in shards if name in listed), SINGLE]
        lost = [name for name in shards if name not in listed]
        if lost:
            raise self.missing(f"{lost[0]} is not there" + ("" if INDEX in found else f", nor is {INDEX}"))
        found |= fetch_files(source, [listed[name] for name in shards], self.cache, self.patience, self.broken)
        folder, digest = self.cache.build_folder(found)
        return FetchedInput(folder, self.uri, revision, f"sha256:{digest}")

    def _shards(self, found: Mapping[str, str]) -> Sequence[str]:
        if INDEX not in found:
            return [SINGLE]
        try:
            shards = sorted(set(json.loads(self.cache.blob(found[INDEX]).read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self.missing(f"{INDEX} is not an index of weights") from None
        other = [name for name in shards if not str(name).endswith(WEIGHTS)]
        if other or not shards:
            raise self.missing(f"{INDEX} names {other[0] if other else 'nothing'}: weights are {WEIGHTS} files only")
        return shards

    def _keep(
        self, source: Source, files: Sequence[RemoteFile], revision: str | None = None, *, folder: str | None = None
    ) -> FetchedInput:
        """Args: folder: of the source, if its files are wanted together instead of one file."""
        kept, digest = self.cache.build_folder(fetch_files(source, files, self.cache, self.patience, self.broken))
        if folder is not None:
            kept /= folder
        elif self.kind == "prompts" or self.uri.endswith(ARCHIVE):
            kept /= files[0].name
        return FetchedInput(kept, self.uri, revision, f"sha256:{digest}")


def _is_text(name: str) -> bool:
    return name.endswith(_TEXTS) and "/" not in name


def _is_data(name: str) -> bool:
    """Whether the file holds rows, or lists files that do; `data.readers` knows their contents."""
    last = name.rpartition("/")[2]
    return not _is_passed_over(name) and (
        last in _DATA_TEXTS or last.removesuffix(".gz").removesuffix(".zst").endswith(_DATA)
    )


def _is_passed_over(name: str) -> bool:
    return any(piece.startswith(".") or piece == "__pycache__" or piece.endswith(".pyc") for piece in name.split("/"))
