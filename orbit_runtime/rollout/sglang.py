"""The SGLang engine: an `Engine` whose slots and passes are a real SGLang server's, spoken to over HTTP.

Belongs here: requests, answers and what may go wrong between them. Does not belong here: starting the server and its
arguments (`sglang_server`), what runs inside it (`sglang_plugin`), HTTP itself (`httpx`).

Token ids go in, token ids and log-probs come out; text is never tokenised again. The samples of one prompt are one
call, so that they share its prefill. A call whose server died is asked again of the server that replaced it; nothing
of its first try was handed on, so no rollout counts twice.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx

from orbit_runtime.adapters.difference import explain_difference
from orbit_runtime.errors import EngineDiedError, GateError, UnsupportedError
from orbit_runtime.policy.snapshot import Snapshot
from orbit_runtime.rollout.taps import ANSWER, build_snapshot, write_request
from orbit_runtime.rollout.text import answer_text
from orbit_runtime.types import AdapterFiles, Completion, FinishReason, Request, Scored, Tokenizer

BASE_VERSION = -1
FACTS_VERSION = 2
"""Of what the plug-in tells in `/server_info`."""
EXPLAIN_FILE = "explain"
"""Beside an adapter's files: the plug-in tells the difference between them and the slot."""
TRIES = 3
FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class Server(Protocol):
    """A server that can be brought back."""

    @property
    def url(self) -> str: ...

    def start(self) -> None:
        """Returns once it answers."""
        ...

    def is_alive(self) -> bool: ...

    def describe(self) -> str:
        """The end of its log, for an error's message."""
        ...

    def stop(self) -> None: ...


@dataclass(frozen=True)
class Loaded:
    adapter: AdapterFiles
    folder: Path


@dataclass(frozen=True)
class Call:
    """Requests that differ in nothing but their draws."""

    requests: tuple[Request, ...]

    def body(self, eos: Sequence[int]) -> dict[str, Any]:
        first = self.requests[0]
        sampling = first.sampling
        return {
            "input_ids": list(first.prompt_ids_T),
            "sampling_params": {
                "n": len(self.requests),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "max_new_tokens": sampling.max_new_tokens,
                "stop": list(sampling.stop),
                "stop_token_ids": list(eos),
            },
            "return_logprob": True,
            "lora_path": first.adapter,
        }


class SGLangEngine:
    """Answers prompts with one SGLang server. For one thread at a time."""

    def __init__(
        self,
        server: Server,
        tokenizer: Tokenizer,
        *,
        folder: Path,
        max_running_requests: int,
        taps: Path | None = None,
    ) -> None:
        """Starts the server.

        Args:
            folder: adapters are handed over as files below it; both sides see it.
            taps: where the plug-in is asked for a snapshot; None: this server's layers cannot be looked at.

        Raises:
            EngineDiedError: it does not start, or answers without Orbit's plug-in.
        """
        self._server = server
        self._tokenizer = tokenizer
        self._eos = tuple(tokenizer.eos_ids)
        self._folder = folder
        self._taps = taps
        self._loaded: dict[str, Loaded] = {}
        self._retired: set[str] = set()
        self.restarts = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-client", daemon=True)
        self._thread.start()
        # Long generations are normal; a server that hangs is found by asking for its health, not by a read timeout.
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10.0), trust_env=False)
        self._slots = asyncio.Semaphore(max_running_requests)
        self._reviving = asyncio.Lock()
        server.start()
        self._call(self._check_plugin())

    # --- slots ---

    def load_adapter(self, name: str, adapter: AdapterFiles) -> None:
        """Hands the published bytes to the server under a name that was never used before."""
        if name in self._loaded or name in self._retired:
            raise GateError(f"adapter name {name!r} was used before", fix="publish every version under a new name")
        folder = self._folder / name
        folder.mkdir(parents=True)
        for file, content in adapter.files.items():
            (folder / file).write_bytes(content)
        self._loaded[name] = Loaded(adapter, folder)
        try:
            self._call(self._with_server(lambda: self._load(name)))
        except GateError:
            del self._loaded[name]
            self._retired.add(name)
            raise

    def unload_adapter(self, name: str) -> None:
        loaded = self._slot(name)
        del self._loaded[name]
        self._retired.add(name)
        self._call(self._with_server(lambda: self._post("/unload_lora_adapter", {"lora_name": name})))
        for file in loaded.adapter.files:
            (loaded.folder / file).unlink(missing_ok=True)
        loaded.folder.rmdir()

    def adapter_digest(self, name: str) -> str:
        """Of what stands in the server's buffers now, as the plug-in reads them."""
        self._slot(name)
        return str(self._fact(name, "slot_digest"))

    def explain_slot(self, name: str, published: AdapterFiles) -> str:
        loaded = self._slot(name)
        question = loaded.folder / EXPLAIN_FILE
        question.touch()
        try:
            facts = self._adapter_facts().get(name)
        finally:
            question.unlink()
        if facts is None:
            return "the server does not hold it"
        folder = Path(facts["path"])
        if folder != loaded.folder:
            found = {each.name: each.read_bytes() for each in folder.iterdir()} if folder.is_dir() else {}
            return f"the server loaded it from {folder}: {explain_difference(published.files, found)}"
        return explain_difference(published.files, loaded.adapter.files) or str(facts["difference"] or "")

    def adapters(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def close(self) -> None:
        """Ends the server and the client. Safe to call twice."""
        if self._loop.is_closed():
            return
        try:
            self._call(self._client.aclose())
        finally:
            self._server.stop()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    def _slot(self, name: str) -> Loaded:
        if name not in self._loaded:
            raise GateError(f"no adapter {name!r} in the engine; it holds {', '.join(self._loaded) or 'none'}")
        return self._loaded[name]

    def _version(self, adapter: str | None) -> int:
        """The server does not say which version sampled a token; the proof of the publish ties name and bytes."""
        return BASE_VERSION if adapter is None else self._slot(adapter).adapter.version

    # --- passes ---

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yields completions as their prompts' calls end.

        Raises:
            GateError: a request names an adapter that is not loaded, or an answer does not fit its request.
            EngineDiedError: the server died again and again.
        """
        for request in requests:
            self._version(request.adapter)
        pending: set[Future[list[Completion]]] = {
            asyncio.run_coroutine_threadsafe(self._generate(call), self._loop) for call in _calls(requests)
        }
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from future.result()
        finally:
            for future in pending:
                future.cancel()

    def score(self, token_ids_T: Sequence[int], adapters: Sequence[str | None]) -> list[Scored]:
        """Prefills of the same tokens, one per adapter; all of them are under way at once."""
        futures = [
            asyncio.run_coroutine_threadsafe(
                self._with_server(lambda name=name: self._score(token_ids_T, name)), self._loop
            )
            for name in adapters
        ]
        scores = [future.result() for future in futures]
        facts = self._adapter_facts() if any(adapters) else {}
        return [
            Scored(logprobs, facts.get(name, {}).get("applied_digest") if name else None)
            for name, logprobs in zip(adapters, scores, strict=True)
        ]

    def snapshot(self, token_ids_T: Sequence[int], adapter: str | None) -> Snapshot:
        """What the server's layers compute for these tokens, and hold; for one caller at a time.

        Raises:
            GateError: the plug-in gave no answer.
        """
        if self._taps is None:
            raise UnsupportedError("this server's layers cannot be looked at", fix="let Orbit start the server")
        asked = partial(self._tapped, self._taps, tuple(token_ids_T), adapter)
        return build_snapshot(asked(()), len(token_ids_T) - 1, values=lambda names: asked(names))

    def _tapped(self, taps: Path, token_ids_T: tuple[int, ...], adapter: str | None, names: Sequence[str]) -> bytes:
        answer = taps / ANSWER
        answer.unlink(missing_ok=True)
        write_request(taps, token_ids_T, adapter, names)
        self._call(self._with_server(lambda: self._score(token_ids_T, adapter)))
        try:
            return answer.read_bytes()
        except OSError:
            raise GateError("the plug-in told nothing of the pass that it was asked for", where="rollout") from None

    async def _generate(self, call: Call) -> list[Completion]:
        async with self._slots:
            answers = await self._with_server(lambda: self._post("/generate", call.body(self._eos)))
        found = answers if isinstance(answers, list) else [answers]
        if len(found) != len(call.requests):
            raise GateError(
                f"asked for {len(call.requests)} samples, the engine answered {len(found)}", where="rollout"
            )
        return [self._completion(request, answer) for request, answer in zip(call.requests, found, strict=True)]

    async def _score(self, token_ids_T: Sequence[int], adapter: str | None) -> tuple[float, ...]:
        body = {
            "input_ids": list(token_ids_T),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "lora_path": adapter,
        }
        answer = await self._post("/generate", body)
        entries = answer["meta_info"]["input_token_logprobs"]
        if [int(token) for _, token, *_ in entries] != list(token_ids_T):
            raise GateError("the engine scored other tokens than it was given", where="rollout")
        return (0.0, *(_number(logprob) for logprob, *_ in entries[1:]))

    def _completion(self, request: Request, answer: dict[str, Any]) -> Completion:
        meta = answer["meta_info"]
        entries = meta.get("output_token_logprobs")
        reason = FINISH.get(str((meta.get("finish_reason") or {}).get("type")))
        if not entries or reason is None or len(entries) > request.sampling.max_new_tokens:
            raise GateError(
                f"request {request.request_id} was answered with {len(entries or ())} tokens and finish reason "
                f"{meta.get('finish_reason')}",
                where="rollout",
            )
        tokens = tuple(int(token) for _, token, *_ in entries)
        return Completion(
            request_id=request.request_id,
            token_ids_T=tokens,
            logprobs_T=tuple(_number(logprob) for logprob, *_ in entries),
            versions_T=(self._version(request.adapter),) * len(tokens),
            finish_reason=reason,
            text=answer_text(self._tokenizer, tokens, request.sampling.stop),
        )

    # --- the server ---

    async def _with_server(self, ask: Any) -> Any:
        """Asks; where the server died meanwhile, brings it back and asks again."""
        for attempt in range(TRIES):
            try:
                return await ask()
            except httpx.TransportError as error:
                if attempt + 1 == TRIES:
                    raise EngineDiedError(
                        f"the engine was lost {TRIES} times: {error or type(error).__name__}",
                        fix=self._server.describe(),
                    ) from None
                await self._revive()
        raise AssertionError("unreachable")

    async def _revive(self) -> None:
        """A new server with the same adapters, each read back before it may answer."""
        async with self._reviving:
            if self._server.is_alive() and await self._is_healthy():
                return
            self._server.stop()
            await asyncio.to_thread(self._server.start)
            self.restarts += 1
            await self._check_plugin()
            for name, loaded in self._loaded.items():
                await self._load(name)
                await self._score((0, 0), name)
                found = (await self._facts()).get(name, {}).get("slot_digest")
                if found != loaded.adapter.digest:
                    raise GateError(
                        f"after a restart the engine holds {str(found)[:19]}… as {name}, not "
                        f"{loaded.adapter.digest[:19]}…",
                        where="rollout",
                    )

    async def _is_healthy(self) -> bool:
        try:
            return (await self._client.get(f"{self._server.url}/health", timeout=10)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _load(self, name: str) -> None:
        body = {"lora_name": name, "lora_path": str(self._loaded[name].folder)}
        try:
            await self._post("/load_lora_adapter", body)
        except GateError as error:
            raise GateError(f"the engine refused adapter {name}: {error.message}", where="publish") from None

    async def _check_plugin(self) -> None:
        states = await self._states()
        if not states or any(state.get("version") != FACTS_VERSION for state in states):
            raise EngineDiedError(
                "the engine runs without Orbit's plug-in, so no adapter could be proven in it",
                fix=self._server.describe(),
            )
        unhooked = sorted({name for state in states for name in state.get("unhooked", ())})
        if unhooked:
            raise EngineDiedError(
                f"this SGLang has no {', '.join(unhooked)} that Orbit's plug-in could hook",
                fix="use the version of SGLang that Orbit is made for",
            )

    async def _states(self) -> list[dict[str, Any]]:
        answer = await self._client.get(f"{self._server.url}/server_info", timeout=60)
        answer.raise_for_status()
        return [state.get("orbit", {}) for state in answer.json()["internal_states"]]

    async def _facts(self) -> dict[str, dict[str, Any]]:
        """By adapter. What two ranks tell differently is None, which equals no digest."""
        merged: dict[str, dict[str, Any]] = {}
        for state in await self._states():
            if "error" in state:
                raise GateError(f"the plug-in cannot read the engine's slots: {state['error']}", where="publish")
            for name, facts in state["adapters"].items():
                before = merged.setdefault(name, facts)
                merged[name] = {key: value if before.get(key) == value else None for key, value in facts.items()}
        return merged

    def _adapter_facts(self) -> dict[str, dict[str, Any]]:
        facts: dict[str, dict[str, Any]] = self._call(self._with_server(self._facts))
        return facts

    def _fact(self, name: str, key: str) -> Any:
        return self._adapter_facts().get(name, {}).get(key)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self._client.post(f"{self._server.url}{path}", json=body)
        if answer.status_code != 200:
            raise GateError(f"{path} was answered with {answer.status_code}: {answer.text[:500]}", where="rollout")
        try:
            return answer.json()
        except ValueError:
            raise GateError(f"{path} was answered with something that is not JSON", where="rollout") from None

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _calls(requests: Sequence[Request]) -> list[Call]:
    grouped: dict[Any, list[Request]] = {}
    for request in requests:
        grouped.setdefault((request.prompt_ids_T, request.sampling, request.adapter), []).append(request)
    return [Call(tuple(group)) for group in grouped.values()]


def _number(value: Any) -> float:
    if not isinstance(value, float | int) or value != value:
        raise GateError(f"the engine answered the log-prob {value!r}", where="rollout")
    return float(value)
