"""Client of an SGLang server's native API: token ids in, token ids and log-probs out.

Belongs here: SGLang's endpoints and fields. Does not belong here: HTTP (`wire`), starting it (`sglang_server`), what
runs inside it (`sglang_plugin`).
"""

from __future__ import annotations

import base64
import json
import pickle
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from orbit_runtime.adapters.files import CONFIG_FILE, MODEL_FILE, adapter_bytes
from orbit_runtime.data.routing import pack_experts
from orbit_runtime.errors import GateError
from orbit_runtime.rollout.requests import end_ids
from orbit_runtime.rollout.server_types import (
    MISSING,
    Ask,
    Call,
    LikeliestTokens,
    ServerFacts,
    Sleeping,
    TokenPiece,
    build_piece,
    from_rows,
    given_fields,
    number,
)
from orbit_runtime.rollout.streaming import LEAST_LOGPROB, NONE, Alternatives
from orbit_runtime.rollout.wire import Wire, adapter_names, exposition
from orbit_runtime.types import FLOATS, TOKENS, AdapterFiles, Cached, RoutedExperts, Scored
from orbit_runtime.workers.servers.protocol import APPLIED_KEY, STATE_KEY

HEALTH_SECONDS = 10.0
PROGRESS_SECONDS = 60.0
"""SGLang itself gives up after 20 s without a sign of its scheduler."""

IDLE_SECONDS = 30
INTERVAL, FEW = 64, 8
TAGS: Mapping[Sleeping, str] = {"cache": "kv_cache", "weights": "weights", "graphs": "cuda_graph"}


class SGLangApi:
    """The interface of SGLang 0.5."""

    takes_prompts = True
    ends_one = True

    def __init__(
        self,
        wire: Wire,
        *,
        method: Literal["Folder", "Upload"] = "Folder",
        deterministic: bool = False,
        routed: RoutedLayers | None = None,
    ) -> None:
        """
        Args:
            method: send adapters as the path of their folder, or as tensors in the request.
            deterministic: send a seed with every sample; a server without that mode ignores it.
            routed: layers whose experts completions report; None for none.
        """
        self._routed = routed
        self._wire = wire
        self._method = method
        self._deterministic = deterministic
        self._ranks = 1
        self._incremental = False
        """Whether each event holds only what is new, rather than everything from the beginning."""

    async def about(self) -> ServerFacts:
        info, model = await self._wire.get("/server_info"), await self._wire.get("/model_info")
        states = [state.get(STATE_KEY) or {} for state in info.get("internal_states") or ()]
        versions = {state.get("version") for state in states}
        targets = info.get("lora_target_modules")
        self._ranks = int(info.get("tp_size") or 1)
        self._incremental = bool(info.get("incremental_streaming_output"))
        return ServerFacts(
            kind="SGLang",
            version=str(info.get("version")),
            model=str(model.get("model_path")),
            serves_lora=bool(info.get("enable_lora")),
            max_rank=info.get("max_lora_rank"),
            targets=tuple(sorted(targets)) if targets else None,
            max_tokens=info.get("context_length"),
            architectures=tuple(model["architectures"]) if model.get("architectures") else None,
            deterministic=bool(info.get("enable_deterministic_inference")),
            ranks=self._ranks,
            plugin=versions.pop() if len(versions) == 1 else None,
            unhooked=tuple(sorted({name for state in states for name in state.get("unhooked", ())})),
        )

    async def is_healthy(self) -> bool:
        return await self._wire.answers("/health", HEALTH_SECONDS)

    async def makes_progress(self) -> bool:
        return await self._wire.answers("/health_generate", PROGRESS_SECONDS)

    async def names(self) -> frozenset[str]:
        return await adapter_names(self._wire)

    async def load(self, name: str, adapter: AdapterFiles, folder: Path) -> None:
        files, num_bytes = adapter.files, adapter_bytes(adapter)
        if self._method == "Folder":
            body = {"lora_name": name, "lora_path": str(folder)}
            await self._wire.post("/load_lora_adapter", body, num_bytes=num_bytes)
            return
        from orbit_runtime.adapters import tensorfile

        # SGLang's own format for this endpoint; it unpickles only tensors, and we unpickle nothing from it.
        tensors = pickle.dumps(dict(tensorfile.parse(files[MODEL_FILE], where=MODEL_FILE)))
        uploaded = {
            "lora_name": name,
            "config_dict": json.loads(bytes(files[CONFIG_FILE])),
            # Each of the server's processes takes the entry of its rank and cuts out its shard itself.
            "serialized_named_tensors": [base64.b64encode(tensors).decode()] * self._ranks,
        }
        await self._wire.post("/load_lora_adapter_from_tensors", uploaded, num_bytes=num_bytes * self._ranks)

    async def unload(self, name: str) -> None:
        await self._wire.post("/unload_lora_adapter", {"lora_name": name})

    async def stream(self, call: Call, eos: Sequence[int]) -> AsyncGenerator[TokenPiece]:
        asks, sampling = call.asks, call.first.sampling
        parameters: list[dict[str, Any]] = [
            {
                "max_new_tokens": ask.max_new_tokens,
                "stop_token_ids": list(end_ids(sampling, eos)),
                **given_fields(sampling),
                "stream_interval": self._interval(ask),
            }
            for ask in asks
        ]
        if self._deterministic:
            for each, ask in zip(parameters, asks, strict=True):
                # The same 64 bits within int64, as SGLang takes seeds, which it hashes (0.5.23: `sampling_params.py`).
                each["sampling_seed"] = ask.request.key - (2**64 if ask.request.key >= 2**63 else 0)
        body = {
            "rid": [ask.rid for ask in asks],
            "input_ids": [ask.input_T for ask in asks],
            "sampling_params": parameters,
            "return_logprob": True,
            "lora_path": [call.first.adapter] * len(asks),
            "stream": True,
        }
        if any(ask.request.alternatives for ask in asks):
            body["top_logprobs_num"] = [ask.request.alternatives for ask in asks]
        if self._routed:
            body["return_routed_experts"] = True
        had: Counter[int] = Counter()
        async with aclosing(self._wire.stream("/generate", body)) as events:
            async for event in events:
                meta, index = _meta(event), int(event.get("index", 0))
                # An index out of range is passed on as it is, and the caller refuses it.
                found = asks[index] if 0 <= index < len(asks) else None
                entries = meta.get("output_token_logprobs") or []
                top = meta.get("output_top_logprobs") or []
                if not self._incremental:
                    entries, top = entries[had[index] :], top[had[index] :]
                had[index] += len(entries)
                reason = (meta.get("finish_reason") or {}).get("type")
                yield build_piece(
                    index,
                    [entry[1] for entry in entries],
                    [entry[0] for entry in entries],
                    reason,
                    total=meta.get("completion_tokens"),
                    adapter=(meta.get(APPLIED_KEY) or [None])[-1],
                    alternatives=_read_alternatives(top, len(entries), found.request.alternatives if found else 0),
                    routed_experts=self._experts(meta, found, had[index])
                    if self._routed and reason and found
                    else None,
                )

    def _experts(self, meta: Mapping[str, Any], ask: Ask, sampled: int) -> RoutedExperts | None:
        """Experts in the last event of a completion; an aborted one may lack them."""
        assert self._routed is not None
        if "routed_experts" not in meta and meta["finish_reason"]["type"] == "abort":
            return None
        return _read_experts(meta, self._routed, len(ask.input_T) + sampled - 1)

    def _interval(self, ask: Ask) -> int:
        """Tokens between events; many if the server repeats the whole completion in each event."""
        if ask.request.is_streamed:
            return 1
        return INTERVAL if self._incremental else max(INTERVAL, ask.max_new_tokens // FEW)

    async def abort(self, rids: Sequence[str]) -> None:
        for rid in rids:
            await self._wire.act("/abort_request", {"rid": rid})

    async def score(
        self, token_ids_T: Sequence[int], adapters: Sequence[str | None], prefix_length: int | None = None
    ) -> list[Scored]:
        """SGLang reads from its cache what lies before a reading's start, and computes the rest.

        Readings of ends come first, so they find what earlier calls left in the cache and nothing of this call.
        """
        starts = [0] if prefix_length is None else [prefix_length, 0]
        # The server multiplies neighbours with the same adapter in one product.
        asked = [(adapter, start) for adapter in adapters for start in starts]
        body = {
            "input_ids": [list(token_ids_T)] * len(asked),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": [start for _, start in asked],
            "lora_path": [adapter for adapter, _ in asked],
            "top_logprobs_num": [int(start == 0) for _, start in asked],
        }
        if self._routed:
            body["return_routed_experts"] = True
        answers = await self._wire.post("/generate", body)
        if not isinstance(answers, list) or len(answers) != len(asked):
            raise GateError(f"/generate was not answered with {len(asked)} readings", where="rollout")
        metas = [_meta(answer) for answer in answers]
        found = [_read_end(meta, list(token_ids_T[start:])) for meta, (_, start) in zip(metas, asked, strict=True)]
        of_whole = metas[len(starts) - 1 :: len(starts)]
        top = [_read_top(meta, len(token_ids_T)) for meta in of_whole]
        inputs = len(token_ids_T) - 1
        experts = [_read_experts(meta, self._routed, inputs) if self._routed else None for meta in of_whole]
        whole = found[len(starts) - 1 :: len(starts)]
        ends = [None] * len(adapters) if prefix_length is None else found[::2]
        return [
            Scored((0.0, *each.logprobs_T), None, end, top_T, routed)
            for each, end, top_T, routed in zip(whole, ends, top, experts, strict=True)
        ]

    async def likeliest(self, token_ids_T: Sequence[int], start: int, count: int) -> LikeliestTokens:
        """See `Api.likeliest`. SGLang may read positions before `start` from its cache. It sends arrays; versions
        before 0.5.23 do not know this option, and send lists.
        """
        body = {
            "input_ids": list(token_ids_T),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
            "top_logprobs_num": count,
            "return_flat_raw_top_logprobs": True,
            "return_flat_raw_top_logprobs_b64": True,
        }
        meta = _meta(await self._wire.post("/generate", body))
        _read_end(meta, list(token_ids_T[start - 1 :]))
        found = _read_arrays(meta, count) if "input_top_logprobs_val_flat_b64" in meta else _read_lists(meta, count)
        if found is None or len(found.ids_RK) != len(token_ids_T) - start:
            raise GateError("the engine reported no likeliest tokens of some of its input", where="rollout")
        return found

    async def facts(self, num_bytes: int = 0) -> Mapping[str, Mapping[str, Any]] | None:
        states = (await self._wire.get("/server_info", num_bytes=num_bytes)).get("internal_states") or ()
        if not states or any(STATE_KEY not in state for state in states):
            return None
        return merge_facts([state[STATE_KEY] for state in states])

    async def sleep(self, parts: Sequence[Sleeping]) -> None:
        # SGLang's scheduler dies if something still runs; flushing the cache waits until nothing does.
        await self._wire.act(f"/flush_cache?timeout={IDLE_SECONDS}", {})
        await self._wire.act("/release_memory_occupation", {"tags": [TAGS[part] for part in parts]})

    async def wake(self, parts: Sequence[Sleeping]) -> None:
        await self._wire.act("/resume_memory_occupation", {"tags": [TAGS[part] for part in parts]})

    async def exposition(self) -> str:
        return await exposition(self._wire)

    async def text(self, token_ids_T: Sequence[int]) -> str | None:
        body = {"tokens": list(token_ids_T), "skip_special_tokens": True}
        return str((await self._wire.post("/detokenize", body))["text"])


def merge_facts(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """The plug-in's facts by adapter, over all ranks; where ranks differ, the value is None, which no digest equals."""
    merged: dict[str, dict[str, Any]] = {}
    for state in states:
        if "error" in state:
            raise GateError(f"the plug-in cannot read the engine's slots: {state['error']}", where="publish")
        for name, facts in state["adapters"].items():
            before = merged.setdefault(name, facts)
            merged[name] = {key: value if before.get(key) == value else None for key, value in facts.items()}
    return merged


@dataclass(frozen=True)
class RoutedLayers:
    """Routed layers of a model, as SGLang reports them: its rows include layers without routed experts."""

    num_layers: int
    with_experts: tuple[int, ...]
    experts_per_token: int


def _read_experts(meta: Mapping[str, Any], routed: RoutedLayers, inputs: int) -> RoutedExperts:
    """Reads int32 `[inputs, layers, experts per token]` in base64."""
    text = meta.get("routed_experts")
    if not isinstance(text, str):
        raise GateError("/generate was answered without routed_experts", where="rollout")
    flat = np.frombuffer(base64.b64decode(text), np.dtype("<i4"))
    if flat.size != inputs * routed.num_layers * routed.experts_per_token:
        raise GateError(f"the engine reported {flat.size} experts for {inputs} tokens", where="rollout")
    chosen_TLC = flat.reshape(inputs, routed.num_layers, routed.experts_per_token)[:, routed.with_experts]
    if chosen_TLC.size and chosen_TLC.min() < 0:
        raise GateError("the engine did not report every token's experts", where="rollout")
    return pack_experts(chosen_TLC)


def _read_end(meta: Mapping[str, Any], asked: Sequence[int]) -> Cached:
    entries = meta.get("input_token_logprobs") or []
    if [int(entry[1]) for entry in entries] != asked:
        raise GateError("the engine scored other tokens than it was given", where="rollout")
    return Cached(tuple(number(entry[0]) for entry in entries[1:]), int(meta.get("cached_tokens") or 0))


def _read_top(meta: Mapping[str, Any], tokens: int) -> tuple[int, ...] | None:
    """The most probable token for each position; None if the server reported none."""
    entries = meta.get("input_top_logprobs") or []
    if len(entries) != tokens or not all(entries[1:]):
        return None
    return (-1, *(int(entry[0][1]) for entry in entries[1:]))


def _read_lists(meta: Mapping[str, Any], count: int) -> LikeliestTokens | None:
    """Likeliest tokens from lists. The first entry is the token before the requested ones."""
    found = (meta.get("input_top_logprobs") or [])[1:]
    return from_rows(found, count) if all(isinstance(each, list) for each in found) else None


def _read_arrays(meta: Mapping[str, Any], count: int) -> LikeliestTokens | None:
    """`[rows, k]` of fp32 and int32 in base64, behind one entry that is left out: the token before."""
    columns = []
    try:
        rows, width = (int(each) for each in meta["input_top_logprobs_shape"])
        for name, dtype, missing in (("val", "float32", MISSING[0]), ("idx", "int32", MISSING[1])):
            if meta[f"input_top_logprobs_{name}_flat_b64_dtype"] != dtype:
                return None
            data = base64.b64decode(meta[f"input_top_logprobs_{name}_flat_b64"])
            told_RK = np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(rows, width)[:, :count]
            columns.append(np.pad(told_RK, ((0, 0), (0, count - told_RK.shape[1])), constant_values=missing))
    except (KeyError, TypeError, ValueError):
        return None
    return LikeliestTokens(*columns) if meta.get("input_top_logprobs_null_prefix") == 1 else None


def _read_alternatives(entries: Sequence[Any], tokens: int, count: int) -> Alternatives | None:
    """`count` alternatives for each token; a truncated distribution may have fewer."""
    if not count:
        return None
    if len(entries) != tokens:
        raise GateError(f"the engine reported alternatives of {len(entries)} tokens for {tokens}", where="rollout")
    ids: array[int] = array(TOKENS)
    logprobs: array[float] = array(FLOATS)
    for entry in entries:
        pairs = [(int(each[1]), float(each[0])) for each in entry or () if each[0] is not None]
        pairs = [each if each[1] > LEAST_LOGPROB else NONE for each in pairs][:count]
        pairs += [NONE] * (count - len(pairs))
        ids.extend(token for token, _ in pairs)
        logprobs.extend(logprob for _, logprob in pairs)
    return ids, logprobs


def _meta(answer: Any) -> dict[str, Any]:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise GateError("/generate was answered without meta_info", where="rollout")
    return meta
