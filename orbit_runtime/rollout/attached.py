"""Servers that somebody else started: finding out what they are, and whether they can serve this run.

Belongs here: what is asked of them before anything is trained, each refusal with what to do.
Does not belong here: servers of our own (`sglang_server`), asking them for rollouts (`served_engine`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.errors import EngineDiedError, GateError, ModelError, UnsupportedError
from orbit_runtime.planner.support.manifests import Kind, check_sampling, shaping_fields
from orbit_runtime.rollout.replica import Replica, Whose
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.rollout.server_types import Api, LostError, ServerFacts
from orbit_runtime.rollout.sglang_api import SGLangApi
from orbit_runtime.rollout.transport import FolderMailbox
from orbit_runtime.rollout.vllm_api import VllmApi
from orbit_runtime.rollout.wire import REFUSED, Wire, build_client, is_serving, why_not_serving
from orbit_runtime.types import Sampling, Tokenizer
from orbit_runtime.workers.servers.process import check_version

_log = logging.getLogger("orbit.rollout")

ATTACH_SECONDS = 60.0
RETURN_SECONDS = 600.0
"""Seconds in which a lost server may return."""
REFUSED_SECONDS = 5.0
"""Seconds for which a teacher may refuse connections at the start, if nothing suggests that it is about to listen."""
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.5, 8.0
"""The first pause between two questions whether a server answers, which doubles, and the longest."""
Method = Literal["Auto", "Folder", "Upload"]


@dataclass(frozen=True)
class Endpoint:
    """A server's address, from the manifest."""

    url: str
    method: Method = "Auto"
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers sent with every request."""

    @property
    def is_local(self) -> bool:
        return urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServerRequirements:
    """A run's requirements on a server."""

    adapter: AdapterConfig | None
    """None: it only scores tokens, by its own model."""
    max_tokens: int
    sampling: Sampling
    probes: tuple[tuple[int, ...], ...]
    """Token ids whose text both sides' tokenizers must agree on."""
    targets: tuple[str, ...] = ()
    """Last parts of the adapted modules' names."""
    architectures: tuple[str, ...] | None = None
    """Architectures of the run's own model; None if another may be served."""
    tolerance: float = 0.0
    is_resumed: bool = False
    """Whether an earlier execution of the run may have left adapters on the servers."""
    engine_version: Literal["Pinned", "Any"] = "Pinned"
    """`Any`: Orbit's plug-in may run in another version of SGLang than the pinned one."""
    where: str = "spec.rollout.endpoints"
    """The manifest's list of these servers; for one of them, its entry."""
    who: str = "endpoint"
    """Each of them, in messages."""


class AttachedServer:
    """Somebody else's: it is waited for, and never started or stopped."""

    def __init__(
        self,
        url: str,
        where: str,
        *,
        seconds: float = RETURN_SECONDS,
        refused_seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            where: the manifest's field that names it.
            seconds: how long it is waited for.
            refused_seconds: how long while its connections are refused; None: as long.
        """
        self.url = url.rstrip("/")
        self._where = where
        self._seconds = seconds
        self._refused_seconds = seconds if refused_seconds is None else min(seconds, refused_seconds)
        self.headers = headers or {}
        self._left = threading.Event()
        """Set once nobody waits for the server."""

    def start(self) -> None:
        """Waits until the server answers; reports this at the beginning and whenever the time has doubled.

        Raises:
            EngineDiedError: (82) it did not answer in time, or the wait was given up.
        """
        self._left.clear()
        began, pause, told = time.monotonic(), POLL_SECONDS, 0.0
        while reason := why_not_serving(self.url, seconds=10, headers=self.headers):
            waited = time.monotonic() - began
            seconds = self._refused_seconds if reason == REFUSED else self._seconds
            if waited > seconds:
                raise EngineDiedError(
                    f"{self.url} did not answer within {seconds:.0f} s: {reason}",
                    where=self._where,
                    fix=f"start the server, or correct its address; if it runs, {self.describe()}",
                )
            if waited >= told:
                _log.warning(
                    "%s: %s does not answer (%s); waiting for it, %.0f of at most %.0f s",
                    self._where, self.url, reason, waited, seconds,
                )  # fmt: skip
                told = max(1.0, 2 * waited)
            if self._left.wait(min(pause, max(POLL_SECONDS, seconds - waited))):
                raise EngineDiedError(f"{self.url} is not waited for any more", where=self._where, fix=self.describe())
            pause = min(2 * pause, LONGEST_POLL_SECONDS)
        if told:
            _log.warning("%s: %s answers now", self._where, self.url)

    def check_listens(self) -> None:
        """Waits for as long as connections may be refused. A server that is loading its model passes.

        Raises:
            EngineDiedError: (82) nothing listens there.
        """
        if why_not_serving(self.url, seconds=10, headers=self.headers) == REFUSED:
            self.start()

    def is_alive(self) -> bool:
        return is_serving(self.url, seconds=10, headers=self.headers)

    def describe(self) -> str:
        return f"look at the log of the server at {self.url}: Orbit did not start it"

    def stop(self) -> None:
        """Ends `start`, so that the end of a run does not wait for a server that is lost."""
        self._left.set()

    def memory_bytes(self) -> None:
        """None: it may be on another machine."""


def attach_engine(
    endpoints: Sequence[Endpoint],
    wanted: ServerRequirements,
    tokenizer: Tokenizer,
    *,
    folder: Path,
    max_running_requests: int,
    attach_seconds: float = ATTACH_SECONDS,
    refused_seconds: float | None = None,
) -> ServedEngine:
    """Attaches to all endpoints, or to none.

    Args:
        folder: where adapters are handed over; the servers see it under this path.
        refused_seconds: see `AttachedServer`, at the start only.

    Raises:
        EngineDiedError: one does not answer (82).
        UnsupportedError: one cannot serve this run, or two are of different versions (78).
        ModelError: one serves another model or tokenizer (66).
    """
    client = build_client()
    desk = FolderMailbox(folder)
    engine = ServedEngine(tokenizer, client, desk=desk, max_running_requests=max_running_requests)
    try:
        wants = [replace(wanted, where=f"{wanted.where}[{index}]") for index, _ in enumerate(endpoints)]
        replicas = []
        for index, (endpoint, own) in enumerate(zip(endpoints, wants, strict=True)):
            AttachedServer(
                endpoint.url, own.where, seconds=attach_seconds, refused_seconds=refused_seconds,
                headers=endpoint.headers,
            ).start()  # fmt: skip
            server = AttachedServer(endpoint.url, own.where, headers=endpoint.headers)
            wire, name = Wire(client, server, own.where), f"{own.who} {index} ({server.url})"
            api = _ask(engine, name, own, partial(_recognise, wire, endpoint, own))
            whose: Whose = "Resumed" if wanted.is_resumed else "Others"
            replicas.append(Replica(name, server, api, engine.loaded, whose=whose, tolerance=wanted.tolerance))
        for own, replica, about in zip(wants, replicas, engine.attach(replicas), strict=True):
            check_about(replica.name, about, own)
            _ask(engine, replica.name, own, partial(_check_inside, replica, own, tokenizer))
        check_alike({replica.name: replica.about for replica in replicas if replica.about}, wanted.where)
    except BaseException:
        engine.close()
        raise
    return engine


def check_about(name: str, about: ServerFacts, wanted: ServerRequirements) -> None:
    """Raises UnsupportedError (78) or ModelError (66) for a server that cannot serve this run."""
    if wanted.adapter is not None:
        _check_sampler(name, about, wanted, wanted.adapter)
    if about.max_tokens is not None and about.max_tokens < wanted.max_tokens:
        raise UnsupportedError(
            f"{name} takes sequences up to {about.max_tokens} tokens, this run's are up to {wanted.max_tokens}",
            where="spec.model.maxSequenceLength",
            fix=f"start the server with a context length of {wanted.max_tokens}, or lower maxSequenceLength",
        )
    theirs, ours = about.architectures, wanted.architectures
    if theirs is not None and ours is not None and set(theirs) != set(ours):
        raise ModelError(
            f"{name} serves {about.model}, a {', '.join(theirs)}; this run's model is a {', '.join(ours)}",
            where=wanted.where,
            fix="let the server serve the model of spec.model.uri",
        )


def _check_sampler(name: str, about: ServerFacts, wanted: ServerRequirements, adapter: AdapterConfig) -> None:
    if about.plugin is not None and wanted.engine_version == "Pinned":
        check_version(about.version, name=name)
    kind: Kind = "vLLM" if about.kind == "vLLM" else "SGLang" if about.plugin is not None else "SGLang without plug-in"
    check_sampling(wanted.sampling, kind, name)
    if about.serves_lora is False:
        raise UnsupportedError(f"{name} serves no adapters", fix="start the server with --enable-lora")
    if about.deterministic:
        raise UnsupportedError(
            f"{name} draws by the seeds of requests, which attached servers get none of: all samples of a prompt would "
            "be one and the same",
            where=wanted.where,
            fix="start the server without --enable-deterministic-inference, or use engine: SGLang",
        )
    if adapter.type == "OFT" and about.plugin is None:
        raise UnsupportedError(
            f"{name} serves no OFT: Orbit's plug-in does not run in it",
            where="spec.adapter.type",
            fix="install Orbit beside SGLang and start it with ORBIT_SGLANG=1 and ORBIT_SGLANG_OFT_BLOCK_SIZE",
        )
    if adapter.type == "LoRA" and about.max_rank is not None and adapter.rank > about.max_rank:
        raise UnsupportedError(
            f"{name} takes adapters up to rank {about.max_rank}, this run's is {adapter.rank}",
            where="spec.adapter.lora.rank",
            fix=f"start the server with --max-lora-rank {adapter.rank}, or lower the rank",
        )
    missing = sorted(set(wanted.targets) - set(about.targets)) if about.targets is not None else []
    if missing and about.targets != ("all",):
        raise UnsupportedError(
            f"{name} adapts no {', '.join(missing)}",
            where="spec.adapter.targets",
            fix=f"start the server with --lora-target-modules {' '.join(sorted(wanted.targets))}",
        )


def check_alike(abouts: Mapping[str, ServerFacts], where: str = "spec.rollout.endpoints") -> None:
    """Raises UnsupportedError (78) where two servers of one run are not of one kind and version."""
    (first, one), *others = abouts.items()
    for name, other in others:
        for what in ("kind", "version", "plugin"):
            a, b = getattr(one, what), getattr(other, what)
            if a != b:
                raise UnsupportedError(
                    f"the endpoints differ in their {what}: {first} has {a}, {name} has {b}",
                    where=where,
                    fix="serve one run with servers of one version",
                )


async def _recognise(wire: Wire, endpoint: Endpoint, wanted: ServerRequirements) -> Api:
    """Chooses the server's interface: SGLang answers `/server_info`, vLLM `/version`."""
    try:
        info: Any = await wire.get("/server_info")
    except GateError:
        info = None
    if isinstance(info, dict) and "internal_states" in info:
        return SGLangApi(wire, method=_method(endpoint, wanted))
    try:
        version = await wire.get("/version")
    except GateError:
        version = None
    if not isinstance(version, dict) or "version" not in version:
        raise UnsupportedError(
            f"{endpoint.url} is neither SGLang nor vLLM's OpenAI server",
            where=wanted.where,
            fix="write the address of the server itself, without a path",
        )
    if wanted.adapter is not None and wanted.adapter.type == "OFT":
        raise UnsupportedError(
            f"{endpoint.url} is vLLM, which serves no OFT", where="spec.adapter.type", fix="write type: LoRA"
        )
    if endpoint.method == "Upload":
        raise UnsupportedError(
            f"{endpoint.url} is vLLM, which reads adapters from a folder only",
            where=wanted.where,
            fix="write adapterMethod: Folder, and rollout.adapterFolder",
        )
    return VllmApi(wire)


def _method(endpoint: Endpoint, wanted: ServerRequirements) -> Literal["Folder", "Upload"]:
    method = endpoint.method
    if method == "Auto":
        method = "Folder" if endpoint.is_local else "Upload"
    if method == "Upload" and wanted.adapter is not None and find_spec("torch") is None:
        raise UnsupportedError(
            f"an adapter goes to {endpoint.url} as tensors, which takes torch, and torch is not installed here",
            where=wanted.where,
            fix="write adapterMethod: Folder, and rollout.adapterFolder; or install torch",
        )
    if method == "Upload" and wanted.adapter is not None and wanted.adapter.type == "OFT":
        raise UnsupportedError(
            "an OFT adapter goes to SGLang as a folder",
            where=wanted.where,
            fix="write adapterMethod: Folder, and rollout.adapterFolder",
        )
    return method


async def _check_inside(replica: Replica, wanted: ServerRequirements, tokenizer: Tokenizer) -> None:
    api = replica.api
    for whole in wanted.probes:
        # Special tokens, most of which have no text here: some servers write them out, and some do not.
        probe = tuple(each for each in whole if each not in tokenizer.marker_ids and tokenizer.decode((each,)))
        theirs, ours = await api.text(probe), tokenizer.decode(probe)
        if theirs is not None and theirs != ours:
            raise ModelError(
                f"{replica.name} has another tokenizer: tokens {list(probe[:8])}… are {theirs[:60]!r} there and "
                f"{ours[:60]!r} here",
                where=wanted.where,
                fix="let the server serve the model of spec.model.uri with its own tokenizer"
                if wanted.architectures
                else "take a teacher with the tokenizer of spec.model.uri: it is sent token ids",
            )
    if isinstance(api, VllmApi) and (shaping := shaping_fields(wanted.sampling)):
        await api.check_processed(wanted.probes[0], shaping)


def _ask[T](engine: ServedEngine, name: str, wanted: ServerRequirements, work: Callable[[], Awaitable[T]]) -> T:
    async def once() -> T:
        try:
            return await asyncio.wait_for(work(), ATTACH_SECONDS)
        except (LostError, TimeoutError) as error:
            raise EngineDiedError(
                f"{name} answered, and then no more: {error or 'it took too long'}",
                where=wanted.where,
                fix="look at the log of the server",
            ) from None

    return engine.call(once())
