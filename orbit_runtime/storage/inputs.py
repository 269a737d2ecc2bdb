"""What a manifest reads, wherever it lies: a URI becomes a local path.

Belongs here: schemes, and which files of a source a run needs. Does not belong here: `builtin://`, whose owners know
their own (`model_info`, `data`), or a source's protocol (`hub`, `bucket`).

A model is its `*.safetensors` and the texts beside them. Pickled weights and code are never fetched.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orbit_runtime.errors import DataError, ModelError, OrbitError, UsageError
from orbit_runtime.storage.bucket import Bucket, MissingError
from orbit_runtime.storage.cache import Cache, default_cache, digest_of
from orbit_runtime.storage.download import Patience, RemoteFile, Source, fetch_files
from orbit_runtime.storage.opening import read_deadline

Kind = Literal["model", "prompts", "code"]
REMOTE = ("hf", "s3")
MOUNTED = {"pvc": "claims", "configmap": "configmaps"}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_CODE_FILES = 10_000
_TEXTS = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_ERRORS: dict[Kind, type[OrbitError]] = {"model": ModelError, "prompts": DataError, "code": UsageError}


@dataclass(frozen=True, slots=True)
class Fetched:
    """Where an input is on this machine."""

    path: Path
    """A folder, or for prompts a file."""
    uri: str
    revision: str | None = None
    """The hub's commit."""
    digest: str | None = None
    """SHA-256 over names and contents, where it was fetched."""

    def to_json(self) -> dict[str, str | None]:
        return {"uri": self.uri, "revision": self.revision, "digest": self.digest}


def fetch_input(
    uri: str,
    kind: Kind,
    where: str,
    *,
    patience: Patience | None = None,
    environ: Mapping[str, str] = os.environ,
    revision: str | None = None,
) -> Fetched:
    """The local folder or file of a URI, downloaded where it has to be.

    Args:
        where: the manifest's field, for messages.
        revision: the hub's commit that an earlier start of the same run used.

    Raises:
        ModelError, DataError, UsageError: (66, 65, 64 by kind) it is not there, or not what its source announced.
        CredentialsError: (77) the source refused.
        StorageError: (74) the source or the disk failed.
        StoppedOnRequest: (75) what arrived is kept.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file":
        return Fetched(Path(rest if separator else uri), uri)
    if scheme in MOUNTED:
        return Fetched(_mounted(uri, scheme, rest, kind, where, environ), uri)
    if scheme not in REMOTE:
        raise _ERRORS[kind](
            f"{scheme}:// is not read here", where=where, fix="use a path, file://, s3://, hf:// or pvc://"
        )
    patience = patience or Patience(read_deadline(environ))
    cache = Cache(default_cache(environ))
    if scheme == "s3":
        return _from_bucket(uri, kind, where, cache, patience)
    with _opened_hub(uri, kind, where, environ, cache, patience, revision) as (source, path, commit, listed):
        if kind == "prompts":
            files = [listed[path]] if path in listed else []
            if not files:
                raise _missing(kind, uri, where)(f"the repository has no file {path!r}")
            return _keep(source, files, kind, where, cache, patience, commit)
        return _keep_model(source, listed, where, cache, patience, commit)


def tree_digest(folder: Path, where: str) -> str:
    """SHA-256 over the names and contents of a folder of code; hidden and compiled files do not count.

    Raises:
        UsageError: there is no such folder, it is empty, or it holds far too much to be code.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", where=where, fix="correct spec.environment.code.uri")
    files: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        # A ConfigMap's volume holds its files a second time below `..data`.
        if any(_is_passed_over(piece) for piece in name.parts) or not path.is_file():
            continue
        files[name.as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
        if len(files) > MAX_CODE_FILES:
            raise UsageError(f"more than {MAX_CODE_FILES} files", where=where, fix="give the code a folder of its own")
    if not files:
        raise UsageError(f"the folder {folder} is empty", where=where, fix="correct spec.environment.code.uri")
    return f"sha256:{digest_of(files)}"


def _from_bucket(uri: str, kind: Kind, where: str, cache: Cache, patience: Patience) -> Fetched:
    if kind == "prompts":
        folder, _, name = uri.rpartition("/")
        if not name or folder in ("s3:/", "s3:"):
            raise DataError(f"{uri!r} names no object", where=where, fix="write s3://bucket/folder/prompts.jsonl")
        bucket = Bucket(folder, _missing(kind, uri, where))
        return _keep(bucket, [bucket.describe(name)], kind, where, cache, patience, None)
    missing = _missing(kind, uri, where)
    bucket = Bucket(uri, missing)
    names = [name for name in bucket.list() if kind == "code" or "/" not in name]
    if kind == "code":
        names = [name for name in names if not any(_is_passed_over(piece) for piece in name.split("/"))]
        if not names or len(names) > MAX_CODE_FILES:
            raise missing(f"{len(names)} files are there; code is 1 to {MAX_CODE_FILES}")
        return _keep(bucket, [bucket.describe(name) for name in names], kind, where, cache, patience, None)
    wanted = [name for name in names if _is_text(name) or name.endswith(".safetensors")]
    return _keep_model(bucket, {name: bucket.describe(name) for name in wanted}, where, cache, patience, None)


def _keep_model(
    source: Source,
    listed: Mapping[str, RemoteFile],
    where: str,
    cache: Cache,
    patience: Patience,
    revision: str | None,
) -> Fetched:
    """Texts first: the index among them says which weights there are."""
    missing = _missing("model", source.uri, where)
    texts = [file for name, file in listed.items() if "/" not in name and _is_text(name)]
    if "config.json" not in listed:
        raise missing("there is no config.json: this is not a model in Hugging Face format")
    found = fetch_files(source, texts, cache, patience, _broken("model", where))
    if INDEX in found:
        try:
            shards = sorted(set(json.loads(cache.blob(found[INDEX]).read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise missing(f"{INDEX} is not an index of weights") from None
    else:
        shards = [SINGLE]
    lost = [name for name in shards if name not in listed]
    if lost:
        raise missing(f"{lost[0]} is not there" + ("" if INDEX in found else f", nor is {INDEX}"))
    found |= fetch_files(source, [listed[name] for name in shards], cache, patience, _broken("model", where))
    return _folder(source, found, cache, revision)


def _keep(
    source: Source,
    files: list[RemoteFile],
    kind: Kind,
    where: str,
    cache: Cache,
    patience: Patience,
    revision: str | None,
) -> Fetched:
    found = fetch_files(source, files, cache, patience, _broken(kind, where))
    kept = _folder(source, found, cache, revision)
    path = kept.path / files[0].name if kind == "prompts" else kept.path
    return Fetched(path, source.uri, revision, kept.digest)


def _folder(source: Source, found: Mapping[str, str], cache: Cache, revision: str | None) -> Fetched:
    try:
        folder, digest = cache.build_folder(found)
    except OSError as error:
        raise cache.explain(error) from None
    return Fetched(folder, source.uri, revision, f"sha256:{digest}")


@contextmanager
def _opened_hub(
    uri: str,
    kind: Kind,
    where: str,
    environ: Mapping[str, str],
    cache: Cache,
    patience: Patience,
    revision: str | None,
) -> Iterator[tuple[Source, str, str, dict[str, RemoteFile]]]:
    from orbit_runtime.storage.hub import Hub, parse_address

    address = parse_address(uri)
    form = "hf://datasets/org/name@revision/file" if kind == "prompts" else "hf://org/name@revision"
    if address is None or (kind == "prompts") != (address.path is not None):
        raise _ERRORS[kind](f"{uri!r} is not an address on the hub", where=where, fix=f"write {form}")
    hub = Hub(uri, address, environ, cache, patience, _missing(kind, uri, where), revision=revision)
    try:
        yield hub, address.path or "", hub.revision, {file.name: file for file in hub.files()}
    finally:
        hub.close()


def _mounted(uri: str, scheme: str, rest: str, kind: Kind, where: str, environ: Mapping[str, str]) -> Path:
    root = Path(environ.get("ORBIT_MOUNTS") or "/mnt") / MOUNTED[scheme]
    path = root / rest
    name = rest.split("/", 1)[0]
    if not name or ".." in rest.split("/"):
        raise _ERRORS[kind](f"{uri!r} names nothing", where=where, fix=f"write {scheme}://name/path")
    if not (root / name).is_dir():
        raise _ERRORS[kind](
            f"{scheme}://{name} is not mounted at {root / name}",
            where=where,
            fix="on a cluster the operator mounts it; elsewhere use a path, or set ORBIT_MOUNTS",
        )
    return path


def _missing(kind: Kind, uri: str, where: str) -> MissingError:
    return lambda message: _ERRORS[kind](f"{uri}: {message}", where=where, fix=f"correct {where}")


def _broken(kind: Kind, where: str) -> Callable[[str, str], OrbitError]:
    return lambda message, name: _ERRORS[kind](
        f"{name} came broken, twice: {message}", where=where, fix="start again; if it stays so, its source is corrupt"
    )


def _is_text(name: str) -> bool:
    return name.endswith(_TEXTS)


def _is_passed_over(piece: str) -> bool:
    return piece.startswith(".") or piece == "__pycache__" or piece.endswith(".pyc")
