"""SGLang and vLLM by hand, over real HTTP: for the faults that a healthy server does not make.

A fake on purpose: it holds no model. Log-probs are a function of adapter, position and token, so that tests can tell
what was asked of whom. What a real SGLang and a real vLLM do is in `tests/engines`.
"""

from __future__ import annotations

import base64
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from orbit_runtime.adapters.files import expected_applied_digest, files_digest
from orbit_runtime.errors import EngineDiedError, OrbitError
from tests.fakes.listening import Events, listen

Answer = tuple[int, Any]
Fault = Callable[["FakeServer", str, dict], Answer | None]
"""Gets path and body of one request; what it returns is answered instead. `None`: as usual."""
CUT = (-1, None)
"""The connection ends without an answer."""


@dataclass
class FakeServer:
    """Speaks SGLang's API, or vLLM's with `kind="vLLM"`. Also a `Server` that can be started again."""

    kind: str = "SGLang"
    version: str = "0.5.23"
    unhooked: tuple[str, ...] = ()
    plugin: bool = True
    words: str = "word"
    """What its tokenizer decodes a token to, before the number."""
    architecture: str = "Qwen3ForCausalLM"
    max_tokens: int = 4096
    vocabulary: int = 256
    sends_arrays: bool = True
    """Whether it sends its likeliest tokens as arrays to clients that ask for them so."""
    key: str | None = None
    """It answers who knows it."""
    headers_seen: list[dict[str, str]] = field(default_factory=list)
    lora: bool = True
    rank: int = 64
    base: float = 0.0
    """Added to every log-prob: another base."""
    shares_cache: bool = False
    """Between adapters, and with the base."""
    cached: set[tuple[str | None, tuple[int, ...]]] = field(default_factory=set)
    """Prompts that it was given before, by adapter."""
    deterministic: bool = False
    """Its tokens follow from the seed of their entry, which it ignores otherwise."""
    held: dict[str, Path | None] = field(default_factory=dict)
    served: list[list[int]] = field(default_factory=list)
    """Prompts that were answered with samples, once for each sample."""
    calls: int = 0
    incremental: bool = True
    """Its events hold what is new; else all from the beginning."""
    piece_tokens: int = 2
    piece_seconds: float = 0.0
    """Between two events."""
    aborted: set[str] = field(default_factory=set)
    deaf: int = 0
    """So many requests to end something are forgotten."""
    faults: deque[Fault] = field(default_factory=deque)
    """Each is asked about every request until it answers one, and is then used up."""
    asleep: set[str] = field(default_factory=set)
    forgets_in_sleep: bool = False
    """Its slots are empty after it."""
    delay: float = 0.0
    hangs: bool = False
    starts: int = 0
    refuses_to_start: bool = False
    stays_away: bool = False
    _http: ThreadingHTTPServer | None = None
    _ending: ThreadingHTTPServer | None = None
    _port: int = 0

    # --- a process, as far as an engine sees it ---

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def headers(self) -> dict[str, str]:
        return {}

    def start(self) -> None:
        if self.refuses_to_start:
            raise EngineDiedError("the fake did not start", fix="look at its log")
        self.starts += 1
        self.held.clear()
        self.cached.clear()
        self.asleep, self.hangs = set(), False
        self._http = listen(self)
        self._port = self._http.server_address[1]

    def is_alive(self) -> bool:
        return self._http is not None

    def describe(self) -> str:
        return "the end of the fake's log"

    def memory_bytes(self) -> int | None:
        return 100 - sum({"kv_cache": 40, "weights": 50, "cuda_graph": 5}[tag] for tag in self.asleep)

    def stop(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            http.shutdown()
            http.server_close()

    kill = stop

    def end(self, http: ThreadingHTTPServer | None) -> None:
        """Ends the process that this was; one that was started since lives."""
        if self._http is http:
            self.stop()

    def answer(self, path: str, body: dict) -> Answer:
        for fault in list(self.faults):
            given = fault(self, path, body)
            if given is not None:
                self.faults.remove(fault)
                return given
        known = SGLANG if self.kind == "SGLang" else VLLM
        return known[path](self, body) if path in known else (404, {"detail": "Not Found"})

    def logprob(self, adapter: str | None, position: int, token: int) -> float:
        shift = 0.0 if adapter is None else 0.01 * (1 + sum(map(ord, adapter)) % 7)
        return -1.0 - 0.001 * ((position * 31 + token * 17) % 100) - shift - self.base

    def top(self, adapter: str | None, prompt: list[int], place: int, count: int) -> list[tuple[float, int]]:
        """What it finds likeliest in the place of this token: the token itself, and those after it."""
        own = self.logprob(adapter, place, prompt[place])
        return [(own - index, (prompt[place] + index) % self.vocabulary) for index in range(count)]

    def is_known(self, adapter: str | None) -> bool:
        return adapter is None or adapter in self.held

    def text(self, tokens: list[int]) -> str:
        return "".join(f"{self.words}{token}" for token in tokens)


def once(path: str, status: int, body: Any = None, when: Callable[[dict], bool] = lambda _: True) -> Fault:
    """One request to `path` is answered like this."""
    return lambda _, asked, given: (status, body) if asked == path and when(given) else None


def dies_at(path: str, when: Callable[[dict], bool] = lambda _: True) -> Fault:
    """The process ends while it works on a request to `path`."""
    unused = [path]

    def die(server: FakeServer, asked: str, given: dict) -> Answer | None:
        # Until it has answered, it is asked about requests to the process that came after, too.
        if asked not in unused or not when(given) or server._ending is server._http:
            return None
        unused.clear()
        server._ending = http = server._http
        threading.Thread(target=server.end, args=(http,)).start()
        time.sleep(0.05)
        return CUT

    return die


# --- SGLang ---


def _server_info(fake: FakeServer, _: dict) -> Answer:
    state: dict[str, Any] = {}
    if fake.plugin:
        adapters = {name: _slot(folder) for name, folder in fake.held.items() if folder is not None}
        state["orbit"] = {"version": 4, "unhooked": list(fake.unhooked), "adapters": adapters}
    return 200, {
        "version": fake.version, "enable_lora": fake.lora, "max_lora_rank": fake.rank, "lora_target_modules": ["all"],
        "enable_deterministic_inference": fake.deterministic, "incremental_streaming_output": fake.incremental,
        "context_length": fake.max_tokens, "internal_states": [state],
    }  # fmt: skip


def _slot(folder: Path) -> dict[str, Any]:
    names = ("adapter_model.safetensors", "adapter_config.json")
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
    try:
        applied = expected_applied_digest(files)
    except (OrbitError, KeyError):
        applied = None
    digest = files_digest(files)
    return {"path": str(folder), "slot": 1, "slot_digest": digest, "applied_digest": applied, "difference": None}


def _model_info(fake: FakeServer, _: dict) -> Answer:
    return 200, {"model_path": "/models/fake", "architectures": [fake.architecture]}


def _models(fake: FakeServer, _: dict) -> Answer:
    base = {"id": "base", "root": "/models/fake", "parent": None, "max_model_len": fake.max_tokens}
    return 200, {"data": [base, *({"id": name, "parent": "base"} for name in fake.held)]}


def _load(fake: FakeServer, body: dict) -> Answer:
    name = body["lora_name"]
    if name in fake.held:
        return 400, {"success": False, "error_message": f"{name} is already loaded"}
    fake.held[name] = Path(body["lora_path"]) if "lora_path" in body else None
    return 200, {"success": True}


def _unload(fake: FakeServer, body: dict) -> Answer:
    if fake.held.pop(body["lora_name"], 0) == 0:
        return 400, {"success": False, "error_message": "not loaded"}
    return 200, {"success": True}


def _sleep(fake: FakeServer, body: dict) -> Answer:
    fake.asleep.update(body["tags"])
    return 200, None


def _wake(fake: FakeServer, body: dict) -> Answer:
    if not fake.asleep.issuperset(body["tags"]):
        return CUT
    fake.asleep.difference_update(body["tags"])
    if fake.forgets_in_sleep:
        fake.held = dict.fromkeys(fake.held)
    return 200, None


def _generate(fake: FakeServer, body: dict) -> Answer:
    if fake.asleep:
        return CUT
    if body.get("stream"):
        return _stream(fake, body)
    if isinstance(body["input_ids"][0], list):
        count = len(body["input_ids"])
        each = ("input_ids", "lora_path", "sampling_params", "logprob_start_len", "top_logprobs_num")
        given = {name: body[name] if isinstance(body.get(name), list) else [body.get(name)] * count for name in each}
        asked = (dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True))
        answers = [_generate(fake, {**body, **own}) for own in asked]
        return next((each for each in answers if each[0] != 200), (200, [found for _, found in answers]))
    adapter, prompt = body.get("lora_path"), body["input_ids"]
    if not fake.is_known(adapter):
        return 400, {"error": {"message": f"{adapter} is not loaded"}}
    sampling = body["sampling_params"]
    if sampling["max_new_tokens"] == 0:
        start = body["logprob_start_len"]
        key = None if fake.shares_cache else adapter, tuple(prompt)
        cached = start if key in fake.cached else 0
        fake.cached.add(key)
        other = 0.5 if fake.shares_cache and cached else 0.0
        entries = [
            [fake.logprob(adapter, at, prompt[at]) - other, prompt[at], None] for at in range(start, len(prompt))
        ]
        entries[0][0] = None
        count = body.get("top_logprobs_num")
        places = range(start + 1, len(prompt)) if count else ()
        top = [None, *([(*each, None) for each in fake.top(adapter, prompt, place, count)] for place in places)]
        told = {"input_token_logprobs": entries, "input_top_logprobs": top, "cached_tokens": cached}
        if fake.sends_arrays and body.get("return_flat_raw_top_logprobs_b64"):
            told |= _arrays(top)
        return 200, {"meta_info": told}
    raise AssertionError("samples are asked for as a stream")


def _arrays(top: list[Any]) -> dict[str, Any]:
    """Nothing, where they are not rows of equal length; then there are the lists."""
    told: dict[str, Any] = {
        "input_top_logprobs": None, "input_top_logprobs_null_prefix": 1,
        "input_top_logprobs_shape": [len(top) - 1, len(top[1])],
    }  # fmt: skip
    try:
        for index, (name, code, dtype) in enumerate((("val", "f", "float32"), ("idx", "i", "int32"))):
            data = array(code, [pair[index] for row in top[1:] for pair in row])
            if len({len(row) for row in top[1:]}) > 1:
                return {}
            told[f"input_top_logprobs_{name}_flat_b64"] = base64.b64encode(data.tobytes()).decode()
            told[f"input_top_logprobs_{name}_flat_b64_dtype"] = dtype
    except TypeError:
        return {}
    return told


def _stream(fake: FakeServer, body: dict) -> Answer:
    if fake.asleep:
        return CUT
    fake.calls += 1
    each = ("rid", "input_ids", "lora_path", "sampling_params", "top_logprobs_num")
    columns = [body.get(name) or [0] * len(body["rid"]) for name in each]
    asked = [dict(zip(each, values, strict=True)) for values in zip(*columns, strict=True)]
    unknown = [one["lora_path"] for one in asked if not fake.is_known(one["lora_path"])]
    if unknown:
        # SGLang's 200 goes out before it looks at the request.
        return 200, Events([{"error": {"message": f"{unknown[0]} is not loaded", "code": 400}}])
    for one in asked:
        # SGLang 0.5.23: `sampling_params.py` for the range.
        seed = one["sampling_params"].get("sampling_seed", 42)
        if not -(2**63) <= seed < 2**63:
            message = f"sampling_seed must be in [-2**63, 2**63 - 1], got {seed}."
            return 200, Events([{"error": {"message": message, "code": 400}}])
        fake.served.append(one["input_ids"])
    return 200, _samples(fake, asked)


def _samples(fake: FakeServer, asked: list[dict]) -> Iterator[dict | float]:
    """Round by round, a piece of each that has not ended."""
    had = [0] * len(asked)
    open_ones = set(range(len(asked)))
    while open_ones:
        yield fake.piece_seconds
        for index in sorted(open_ones):
            one = asked[index]
            # SGLang 0.5.23: `scheduler.py`, `abort_request` compares beginnings.
            is_aborted = any(one["rid"].startswith(rid) for rid in fake.aborted)
            limit = one["sampling_params"]["max_new_tokens"]
            upto = had[index] if is_aborted else min(limit, had[index] + fake.piece_tokens)
            reason = "abort" if is_aborted else "length" if upto == limit else None
            yield _event(fake, one, index, range(had[index] if fake.incremental else 0, upto), upto, reason)
            had[index] = upto
            open_ones -= {index} if reason else set()


def _event(fake: FakeServer, one: dict, index: int, span: range, total: int, reason: str | None) -> dict:
    # `sampling_batch_info.py` for the seed of who brings none.
    seed, prompt = one["sampling_params"].get("sampling_seed", 42), one["input_ids"]
    tokens = [(seed >> 8 * at) % 256 if fake.deterministic else at for at in span]
    logprobs = [fake.logprob(one["lora_path"], len(prompt) + at, t) for at, t in zip(span, tokens, strict=True)]
    entries = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
    meta = {"id": one["rid"], "completion_tokens": total, "output_token_logprobs": entries}
    others = range(one["top_logprobs_num"])
    meta["output_top_logprobs"] = [[[entry[0] - at, entry[1] + at, None] for at in others] for entry in entries]
    told = {"type": reason, **({"message": "Aborted"} if reason == "abort" else {})} if reason else None
    return {"index": index, "output_ids": tokens, "meta_info": {**meta, "finish_reason": told}}


def _abort(fake: FakeServer, body: dict) -> Answer:
    if fake.deaf:
        fake.deaf -= 1
    else:
        fake.aborted.add(body["rid"])
    return 200, b""


def _metrics(fake: FakeServer, _: dict) -> Answer:
    name = "sglang:num_running_reqs" if fake.kind == "SGLang" else "vllm:num_requests_running"
    lines = (
        f"# HELP {name} Requests that run.",
        f"# TYPE {name} gauge",
        f'{name}{{model_name="fake"}} {len(fake.served)}',
        "# TYPE process_open_fds gauge",
        "process_open_fds 7",
    )
    return 200, "\n".join((*lines, "")).encode()


SGLANG: dict[str, Callable[[FakeServer, dict], Answer]] = {
    **dict.fromkeys(("/health", "/health_generate"), lambda fake, _: (503 if fake.hangs else 200, None)),
    "/metrics": _metrics,
    "/server_info": _server_info,
    "/model_info": _model_info,
    "/v1/models": _models,
    "/load_lora_adapter": _load,
    "/load_lora_adapter_from_tensors": _load,
    "/unload_lora_adapter": _unload,
    "/generate": _generate,
    "/abort_request": _abort,
    "/flush_cache?timeout=30": lambda *_: (200, None),
    "/release_memory_occupation": _sleep,
    "/resume_memory_occupation": _wake,
    "/detokenize": lambda fake, body: (200, {"text": fake.text(body["tokens"])}),
}


# --- vLLM ---


def _completions(fake: FakeServer, body: dict) -> Answer:
    adapter, prompt = None if body["model"] == "base" else body["model"], body["prompt"]
    if not fake.is_known(adapter):
        return 404, {"error": {"message": f"The model `{adapter}` does not exist."}}
    if body.get("stream"):
        fake.calls += 1
        fake.served += [prompt] * body["n"]
        return 200, _choices(fake, adapter, body)
    choices = []
    for index in range(body.get("n", 1)):
        count = body["max_tokens"]
        logprobs = [fake.logprob(adapter, len(prompt) + at, at) for at in range(count)]
        choice = {
            "index": index, "finish_reason": "length", "token_ids": list(range(count)),
            "logprobs": {"token_logprobs": logprobs, "top_logprobs": [{"a": -0.5 / body["temperature"]}]}
            if body["temperature"] else None,
        }  # fmt: skip
        if "prompt_logprobs" in body:
            places = range(1, len(prompt))
            told = [_ranked(fake, adapter, prompt, place, body["prompt_logprobs"]) for place in places]
            choice["prompt_logprobs"] = [None, *told]
        choices.append(choice)
    return 200, {"choices": choices[::-1]}


def _ranked(fake: FakeServer, adapter: str | None, prompt: list[int], place: int, count: int) -> dict[str, Any]:
    """The sequence's own token comes first, of whatever rank it is."""
    own = prompt[place]
    ranked = {
        str(t): {"logprob": p, "rank": at} for at, (p, t) in enumerate(fake.top(adapter, prompt, place, count), 1)
    }
    return {str(own): {"logprob": fake.logprob(adapter, place, own), "rank": count + 7}} | ranked


def _choices(fake: FakeServer, adapter: str | None, body: dict) -> Iterator[dict | float]:
    for start in range(0, body["max_tokens"], fake.piece_tokens):
        yield fake.piece_seconds
        span = range(start, min(body["max_tokens"], start + fake.piece_tokens))
        logprobs = [fake.logprob(adapter, len(body["prompt"]) + at, at) for at in span]
        reason = "length" if span.stop == body["max_tokens"] else None
        for index in reversed(range(body["n"])):
            choice = {"index": index, "token_ids": [*span], "logprobs": {"token_logprobs": logprobs}}
            yield {"choices": [{**choice, "finish_reason": reason}]}


VLLM: dict[str, Callable[[FakeServer, dict], Answer]] = {
    "/health": lambda *_: (200, None),
    "/metrics": _metrics,
    "/version": lambda fake, _: (200, {"version": fake.version}),
    "/v1/models": _models,
    "/v1/load_lora_adapter": lambda fake, body: _plain(_load(fake, body)),
    "/v1/unload_lora_adapter": lambda fake, body: _plain(_unload(fake, body)),
    "/v1/completions": _completions,
    "/detokenize": lambda fake, body: (200, {"prompt": fake.text(body["tokens"])}),
}


def _plain(answer: Answer) -> Answer:
    """vLLM answers these with a sentence."""
    return (200, b"Success: done.") if answer[0] == 200 else answer
