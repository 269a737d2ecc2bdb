"""Repositories of a Hugging Face hub, or of a server that speaks as one, as a source of downloads.

Belongs here: the hub's two requests (what is in a revision; a file's bytes) and what its refusals mean.
Does not belong here: the cache, or which files a run needs (`inputs`).

A branch is resolved to its commit first, and everything is read from that commit.
"""

from __future__ import annotations

import email.utils
import hashlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from orbit_runtime.errors import CredentialsError, OrbitError, StorageError, UnsupportedError
from orbit_runtime.storage.bucket import MissingError
from orbit_runtime.storage.cache import Cache
from orbit_runtime.storage.download import InterruptedTransfer, Patience, RemoteFile

if TYPE_CHECKING:
    import httpx

ENDPOINT = "https://huggingface.co"
READ_BYTES = 2**20
MAX_PAUSE_SECONDS = 60.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ADDRESS = re.compile(r"(datasets/)?([\w.-]+/[\w.-]+)(?:@([^/?#]+))?(?:/(.+))?", re.ASCII)
_PASSING = (408, 425, 429)


@dataclass(frozen=True, slots=True)
class HubAddress:
    """Example: `hf://datasets/org/name@main/train.jsonl` is `HubAddress("datasets", "org/name", "main", "train.jsonl")`"""

    kind: str
    repository: str
    revision: str
    path: str | None


def parse_address(uri: str) -> HubAddress | None:
    """`None` where it is none."""
    found = _ADDRESS.fullmatch(uri.removeprefix("hf://"))
    if found is None or ".." in uri.split("/"):
        return None
    return HubAddress("datasets" if found[1] else "models", found[2], found[3] or "main", found[4])


class Hub:
    """One repository at one commit.

    Args:
        revision: the commit that an earlier start of the run used, instead of the address's.
        missing: makes the error for what is not there.
    """

    def __init__(
        self,
        uri: str,
        address: HubAddress,
        environ: Mapping[str, str],
        cache: Cache,
        patience: Patience,
        missing: MissingError,
        *,
        revision: str | None = None,
    ) -> None:
        self.uri = uri
        self._address, self._cache, self._patience, self._missing = address, cache, patience, missing
        self._client = build_client(uri)
        endpoint = (environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
        self._token = environ.get("HF_TOKEN")
        kind = "" if address.kind == "models" else f"{address.kind}/"
        self._listing_url = f"{endpoint}/api/{address.kind}/{address.repository}/revision"
        self._files_url = f"{endpoint}/{kind}{address.repository}/resolve"
        self.revision, self._files = self._list(revision or address.revision)
        self.identity = f"{endpoint}/{kind}{address.repository}@{self.revision}"

    def files(self) -> Sequence[RemoteFile]:
        return self._files

    def close(self) -> None:
        self._client.close()

    def read(self, file: RemoteFile, start: int) -> tuple[int, Iterator[bytes]]:
        url = f"{self._files_url}/{self.revision}/{quote(file.name)}"
        # Compression would count other bytes than the file's.
        headers = {**self._headers(), "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        chunks = self._stream(url, headers, start)
        offset = next(chunks)
        assert isinstance(offset, int)
        return offset, (chunk for chunk in chunks if isinstance(chunk, bytes))

    def check_unchanged(self, file: RemoteFile) -> None:
        """A commit does not change."""

    def _stream(self, url: str, headers: dict[str, str], start: int) -> Iterator[int | bytes]:
        """First the offset at which the answer starts, then its bytes."""
        with _as_interruption(), self._client.stream("GET", url, headers=headers) as answer:
            self._check(answer, url.rsplit("/", 1)[-1])
            yield _offset(answer, start)
            yield from answer.iter_bytes(READ_BYTES)

    def _list(self, revision: str) -> tuple[str, tuple[RemoteFile, ...]]:
        key = hashlib.sha256(f"{self._listing_url}/{revision}".encode()).hexdigest()
        # What a commit holds is fixed, so a second start does not need the hub at all.
        listing = self._cache.load_listing(key) if _COMMIT.fullmatch(revision) else None
        if listing is None:
            listing = self._ask(f"{self._listing_url}/{quote(revision, safe='')}?blobs=true")
        try:
            commit, files = str(listing["sha"]), tuple(_file(each) for each in listing["siblings"])
            if not _COMMIT.fullmatch(commit):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise StorageError(
                "the hub's answer about this repository cannot be understood",
                where=self.uri,
                fix="check HF_ENDPOINT: it must name a Hugging Face hub or a mirror of one",
            ) from None
        kept = hashlib.sha256(f"{self._listing_url}/{commit}".encode()).hexdigest()
        try:
            self._cache.save_listing(kept, listing)
        except OSError as error:
            raise self._cache.explain(error) from None
        return commit, files

    def _ask(self, url: str) -> Any:
        patience, tries = self._patience, 0
        started = patience.monotonic()
        while True:
            try:
                with _as_interruption():
                    answer = self._client.get(url, headers=self._headers())
                    self._check(answer, "the repository")
                return answer.json()
            except ValueError:
                return None
            except InterruptedTransfer as cut:
                pause = min(8.0, 0.1 * 2**tries) if cut.wait is None else cut.wait
                tries += 1
                seconds = patience.monotonic() - started
                if seconds + pause > patience.deadline_seconds:
                    raise StorageError(
                        f"the hub could not be asked for {seconds:.0f} s: {cut.reason}",
                        where=self.uri,
                        fix="check HF_ENDPOINT and that the hub is reachable from here, then start again",
                    ) from None
                patience.sleep(pause)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _check(self, answer: httpx.Response, what: str) -> None:
        """Raises for everything but success."""
        status, code = answer.status_code, answer.headers.get("x-error-code", "")
        if status < 400:
            return
        if status in _PASSING or status >= 500:
            raise InterruptedTransfer(f"HTTP {status}", wait=_retry_after(answer))
        if status in (401, 403):
            raise self._refused(status, code)
        if code == "RevisionNotFound":
            raise self._missing(f"the repository has no revision {self._address.revision!r}")
        if status in (404, 410):
            name = what if what != "the repository" else self._address.repository
            raise self._missing(f"{name} is not on the hub")
        raise StorageError(f"the hub answered HTTP {status}", where=self.uri, fix="check HF_ENDPOINT")

    def _refused(self, status: int, code: str) -> OrbitError:
        if code == "GatedRepo":
            fix = "accept its terms on the hub, with the account that HF_TOKEN belongs to"
        elif self._token:
            fix = "check the name, and that HF_TOKEN is valid and may read this repository"
        else:
            fix = "check the name; for a private or gated repository set HF_TOKEN (on a cluster through a secret in "
            fix += "spec.placement.envFromSecrets)"
        # The hub answers 401 for names that do not exist, too, and does not say which it was.
        reason = f"HTTP {status} {code}".rstrip()
        return CredentialsError(f"the hub refused this repository ({reason})", where=self.uri, fix=fix)


def build_client(where: str) -> httpx.Client:
    """Follows redirects to other hosts, which do not get the token: httpx drops it there."""
    try:
        import httpx
    except ImportError:
        raise UnsupportedError(
            "reading from a hub needs httpx, which is not installed", where=where, fix="pip install 'orbit-rl[train]'"
        ) from None
    return httpx.Client(follow_redirects=True, timeout=httpx.Timeout(30.0, connect=10.0))


@contextmanager
def _as_interruption() -> Iterator[None]:
    import httpx

    try:
        yield
    except httpx.HTTPError as error:
        raise InterruptedTransfer(_reason(error)) from None
    except httpx.InvalidURL:
        raise InterruptedTransfer("the hub's address is no URL; check HF_ENDPOINT") from None


def _reason(error: Exception) -> str:
    """Without the address: a redirect's holds a signature."""
    name = type(error).__name__
    words = {"ConnectError": "no connection", "ReadTimeout": "no answer for 30 s", "RemoteProtocolError": "cut off"}
    return words.get(name, re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())


def _offset(answer: httpx.Response, start: int) -> int:
    """Where the answer's bytes begin: servers may ignore a range."""
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
    if name.startswith("/") or {"", ".", ".."} & set(name.split("/")) or "\\" in name or "\0" in name:
        raise ValueError(name)
    if lfs:
        sha256 = str(lfs["sha256"])
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise ValueError(sha256)
        return RemoteFile(name, int(lfs["size"]), sha256, sha256=sha256)
    return RemoteFile(name, int(sibling["size"]), blob, git_sha1=blob if _COMMIT.fullmatch(blob) else None)
