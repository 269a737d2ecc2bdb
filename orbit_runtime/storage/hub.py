"""Repositories of a Hugging Face hub, or of a compatible server, as a source of downloads.

Belongs here: the hub's two requests (contents of a revision; a file's bytes) and what its refusals mean.
Does not belong here: the cache, or which files a run needs (`inputs`).

A branch is resolved to its commit first, and everything is read from that commit.
"""

from __future__ import annotations

import email.utils
import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from tenacity import RetryCallState, RetryError, Retrying, retry_if_exception_type

from orbit_runtime.errors import CredentialsError, OrbitError, StorageError
from orbit_runtime.spec.hub_address import parse_address
from orbit_runtime.storage.cache import (
    QUIET_TRIES,
    UNREACHED_SECONDS,
    Cache,
    InterruptedTransfer,
    MissingError,
    RemoteFile,
    RetryPolicy,
)
from orbit_runtime.storage.store import NotFound, stays_inside

if TYPE_CHECKING:
    import httpx

ENDPOINT = "https://huggingface.co"
MAX_PAUSE_SECONDS = 60.0
MAX_UNREACHED = 5
"""Tries that reach no hub at all, with pauses of 1, 2, 4 and 8 s between them, before an error."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PASSING = (408, 425, 429)


@dataclass(frozen=True, slots=True)
class HubAccess:
    """How this process reaches a hub."""

    endpoint: str = ENDPOINT
    token: str | None = None
    offline: bool = False

    def __repr__(self) -> str:
        return f"HubAccess({self.endpoint!r})"


def read_access(environ: Mapping[str, str]) -> HubAccess:
    """Reads the variables of Hugging Face's own tools, and the token that `hf auth login` keeps."""
    endpoint = (environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    token = environ.get("HF_TOKEN", "").strip()
    if not token:
        home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
        try:
            token = Path(environ.get("HF_TOKEN_PATH") or Path(home) / "token").read_text().strip()
        except (OSError, ValueError):
            token = ""
    offline = environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return HubAccess(endpoint, token or None, offline)


class Hub:
    """One repository at one commit.

    Args:
        missing: makes the error for something that does not exist.
        cache: keeps the listing of a commit, so that another start does not need the hub; `None` keeps nothing.
        revision: the commit that an earlier start of the run used, instead of the address's.
    """

    def __init__(
        self,
        uri: str,
        access: HubAccess,
        patience: RetryPolicy,
        missing: MissingError,
        *,
        cache: Cache | None = None,
        revision: str | None = None,
    ) -> None:
        address = parse_address(uri)
        assert address is not None, uri
        self.uri = uri
        self._access, self._cache, self._patience, self._missing = access, cache, patience, missing
        self._client = _build_client(patience.silent_seconds)
        self._host = urlsplit(access.endpoint).netloc or access.endpoint
        self._repository, self._asked = address.repository, revision or address.revision
        kind = "" if address.kind == "models" else f"{address.kind}/"
        self._listing_url = f"{access.endpoint}/api/{address.kind}/{address.repository}/revision"
        self._files_url = f"{access.endpoint}/{kind}{address.repository}/resolve"
        try:
            self.revision, self._files = self._list(self._asked)
        except BaseException:
            self._client.close()
            raise
        self.identity = f"{access.endpoint}/{kind}{address.repository}@{self.revision}"

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def files(self) -> Sequence[RemoteFile]:
        return [*self._files.values()]

    def read(self, file: RemoteFile, start: int) -> tuple[int, Iterator[bytes]]:
        chunks = self._stream(file.name, start)
        offset = next(chunks)
        assert isinstance(offset, int)
        return offset, (chunk for chunk in chunks if isinstance(chunk, bytes))

    def check_unchanged(self, file: RemoteFile) -> None:
        """A commit does not change."""

    def exists(self, key: str) -> bool:
        return key in self._files

    def size(self, key: str) -> int:
        """Bytes of one file. Raises `NotFound`."""
        if key not in self._files:
            raise NotFound(f"{key} is not there", where=self.uri)
        return self._files[key].size

    def get(self, key: str) -> bytes:
        """One small file, whole. Raises `NotFound`."""
        return self.get_range(key, 0, self.size(key))

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes `[start, end)` of one file. Raises `NotFound`."""
        wanted = min(end, self.size(key)) - start
        return self._patiently(lambda: self._read_range(key, start, wanted)) if wanted > 0 else b""

    def _read_range(self, key: str, start: int, wanted: int) -> bytes:
        offset, data = -1, b""
        for each in self._stream(key, start, start + wanted):
            if isinstance(each, int):
                offset = each
                continue
            data += each
            if offset + len(data) >= start + wanted:
                return data[start - offset :][:wanted]
        raise InterruptedTransfer(f"it ended after {len(data)} of {wanted} bytes")

    def _stream(self, name: str, start: int, end: int | None = None) -> Iterator[int | bytes]:
        """Yields the offset at which the response starts, then its bytes."""
        self._check_online(name)
        # With compression, byte counts would not be the file's.
        headers = {**self._headers(), "Accept-Encoding": "identity"}
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        url = f"{self._files_url}/{self.revision}/{quote(name)}"
        with _as_interruption(), self._client.stream("GET", url, headers=headers) as answer:
            self._check(answer, name)
            yield _offset(answer, start)
            # In the sizes received: to form larger chunks, httpx buffers bytes that a broken connection would lose.
            yield from answer.iter_bytes()

    def _list(self, revision: str) -> tuple[str, dict[str, RemoteFile]]:
        # The contents of a commit are fixed; a branch is resolved again, unless offline.
        known = _COMMIT.fullmatch(revision) or self._access.offline
        listing = self._cache.load_listing(self._listing_key(revision)) if self._cache and known else None
        if listing is None:
            self._check_online(f"revision {revision!r}")
            # The first try of a host that does not answer, or of a name that nobody resolves, is silent for seconds.
            self._patience.notice(f"asking {self._host} for {self._repository}")
            listing = self._patiently(lambda: self._ask(f"{self._listing_url}/{quote(revision, safe='')}?blobs=true"))
        try:
            commit, files = str(listing["sha"]), [_file(each) for each in listing["siblings"]]
            if not _COMMIT.fullmatch(commit):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise StorageError(
                "the hub's answer about this repository cannot be understood",
                where=self.uri,
                fix="check HF_ENDPOINT: it must name a Hugging Face hub or a mirror of one",
            ) from None
        if self._cache is not None:
            for name in {revision, commit}:
                self._cache.save_listing(self._listing_key(name), listing)
        return commit, {file.name: file for file in files}

    def _listing_key(self, revision: str) -> str:
        return hashlib.sha256(f"{self._listing_url}/{revision}".encode()).hexdigest()

    def _ask(self, url: str) -> Any:
        with _as_interruption():
            answer = self._client.get(url, headers=self._headers())
        self._check(answer, None)
        try:
            return answer.json()
        except ValueError:
            return None

    def _patiently[T](self, call: Callable[[], T]) -> T:
        patience = self._patience
        started = patience.monotonic()

        def is_enough(state: RetryCallState) -> bool:
            cut, seconds = _cut(state), patience.monotonic() - started
            # One try may use up the time because this process was suspended.
            seconds = (seconds if state.attempt_number > 1 else 0.0) + _pause(state)
            if cut.reached:
                return seconds > patience.deadline_seconds
            return state.attempt_number >= MAX_UNREACHED or seconds > min(UNREACHED_SECONDS, patience.deadline_seconds)

        def tell(state: RetryCallState) -> None:
            cut = _cut(state)
            if not cut.reached or state.attempt_number >= QUIET_TRIES:
                of = "" if cut.reached else f" of {MAX_UNREACHED}"
                patience.notice(
                    f"{self._host}: {cut.reason} (try {state.attempt_number}{of}); next in {_pause(state):.0f} s"
                )

        retrying = Retrying(
            retry=retry_if_exception_type(InterruptedTransfer), stop=is_enough, wait=_pause, sleep=patience.sleep,
            before_sleep=tell,
        )  # fmt: skip
        try:
            return retrying(call)
        except RetryError as end:
            last = end.last_attempt
            cut = last.exception()
            raise StorageError(
                f"{self._host} could not be reached: {last.attempt_number} tries in "
                f"{patience.monotonic() - started:.0f} s, the last one: {cut}",
                where=self.uri,
                fix="check the network, HTTPS_PROXY and HF_ENDPOINT (a mirror's address), then start again; with "
                "everything in the download cache, HF_HUB_OFFLINE=1 needs no network",
            ) from None

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._access.token}"} if self._access.token else {}

    def _check_online(self, what: str) -> None:
        if self._access.offline:
            raise self._missing(
                f"{what} is not in the download cache, and HF_HUB_OFFLINE forbids contacting the hub",
                fix="unset HF_HUB_OFFLINE, or point ORBIT_CACHE at a cache that holds it",
            )

    def _check(self, answer: httpx.Response, name: str | None) -> None:
        """Raises unless the request succeeded. `name`: the file's, or `None` for the repository."""
        status, code = answer.status_code, answer.headers.get("x-error-code", "")
        if status < 300:
            return
        if status in _PASSING or status >= 500:
            raise InterruptedTransfer(f"HTTP {status}", wait=_retry_after(answer))
        if status in (401, 403):
            raise self._refused(status, code)
        if code == "RevisionNotFound":
            raise self._missing(f"the repository has no revision {self._asked!r}")
        if status in (404, 410):
            raise self._missing(f"{name or self._repository} is not on the hub")
        raise StorageError(f"the hub answered HTTP {status}", where=self.uri, fix="check HF_ENDPOINT")

    def _refused(self, status: int, code: str) -> OrbitError:
        if code == "GatedRepo":
            fix = "accept its terms on the hub, with the account that HF_TOKEN belongs to"
        elif self._access.token:
            fix = "check the name, and that HF_TOKEN is valid and may read this repository"
        else:
            fix = "check the name; for a private or gated repository set HF_TOKEN (on a cluster through a secret in "
            fix += "spec.placement.envFromSecrets)"
        # The hub also answers 401 for names that do not exist, and does not tell the cases apart.
        reason = f"HTTP {status} {code}".rstrip()
        return CredentialsError(f"the hub refused this repository ({reason})", where=self.uri, fix=fix)


def _build_client(silent_seconds: float) -> httpx.Client:
    """A client that follows redirects to other hosts, to which httpx does not send the token."""
    import httpx

    return httpx.Client(follow_redirects=True, timeout=httpx.Timeout(silent_seconds, connect=10.0))


def _cut(state: RetryCallState) -> InterruptedTransfer:
    """Why the newest try failed."""
    assert state.outcome is not None
    cut = state.outcome.exception()
    assert isinstance(cut, InterruptedTransfer)
    return cut


def _pause(state: RetryCallState) -> float:
    """Seconds before the next try: as the hub requests, or twice as long as before."""
    cut = _cut(state)
    first = 0.1 if cut.reached else 1.0
    return min(8.0, first * 2 ** (state.attempt_number - 1)) if cut.wait is None else cut.wait


@contextmanager
def _as_interruption() -> Iterator[None]:
    import httpx

    try:
        yield
    except httpx.HTTPError as error:
        silent = (httpx.ConnectError, httpx.TimeoutException, httpx.ProxyError)
        raise InterruptedTransfer(_reason(error), reached=not isinstance(error, silent)) from None
    except httpx.InvalidURL:
        raise InterruptedTransfer("the hub's address is not a URL; check HF_ENDPOINT") from None


def _reason(error: Exception) -> str:
    """The reason without the address: a redirect's contains a signature."""
    name = type(error).__name__
    words = {
        "ConnectError": "no connection",
        "ConnectTimeout": "no connection in 10 s",
        "ReadTimeout": "no answer in time",
        "RemoteProtocolError": "cut off",
    }
    return words.get(name, re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())


def _offset(answer: httpx.Response, start: int) -> int:
    """The offset at which the response's bytes begin: servers may ignore a range."""
    if answer.status_code != 206:
        return 0
    found = re.match(r"bytes (\d+)-", answer.headers.get("content-range", ""))
    offset = int(found[1]) if found else -1
    if offset != start:
        raise InterruptedTransfer(f"asked for bytes from {start}, the answer starts at {offset}")
    return offset


def _retry_after(answer: httpx.Response) -> float | None:
    text = answer.headers.get("retry-after", "")
    if text.isdigit():
        return min(MAX_PAUSE_SECONDS, float(text))
    try:
        return min(MAX_PAUSE_SECONDS, max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time()))
    except (ValueError, TypeError):
        return None


def _file(sibling: Mapping[str, Any]) -> RemoteFile:
    name, blob, lfs = str(sibling["rfilename"]), str(sibling.get("blobId") or ""), sibling.get("lfs")
    if not stays_inside(name):
        raise ValueError(name)
    if lfs:
        sha256 = str(lfs["sha256"])
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise ValueError(sha256)
        return RemoteFile(name, int(lfs["size"]), sha256, sha256=sha256)
    return RemoteFile(name, int(sibling["size"]), blob, git_sha1=blob if _COMMIT.fullmatch(blob) else None)
