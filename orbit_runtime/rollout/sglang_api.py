"""Asking an SGLang server through its own API: token ids in, token ids and log-probs out.

Belongs here: SGLang's endpoints and fields. Does not belong here: HTTP (`wire`), starting it (`sglang_server`), what
runs inside it (`sglang_plugin`).
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.state import CONFIG_FILE, MODEL_FILE
from orbit_runtime.errors import GateError
from orbit_runtime.rollout.served import About, Call, Sampled, Sleeping, check_sampled, number
from orbit_runtime.rollout.wire import Wire, adapter_names, exposition
from orbit_runtime.types import AdapterFiles, Cached, Scored

HEALTH_SECONDS = 10.0
PROGRESS_SECONDS = 60.0
"""SGLang itself gives up after 20 s without a sign of its scheduler."""

IDLE_SECONDS = 30
TAGS: Mapping[Sleeping, str] = {"cache": "kv_cache", "weights": "weights", "graphs": "cuda_graph"}


class SGLangApi:
    """Of SGLang 0.5."""

    takes_prompts = True

    def __init__(
        self, wire: Wire, *, method: Literal["Folder", "Upload"] = "Folder", deterministic: bool = False
    ) -> None:
        """
        Args:
            method: adapters go as the path of their folder, or as tensors in the request.
            deterministic: every sample brings its own seed, which a server without that mode ignores.
        """
        self._wire = wire
        self._method = method
        self._deterministic = deterministic
        self._ranks = 1

    async def about(self) -> About:
        info, model = await self._wire.get("/server_info"), await self._wire.get("/model_info")
        states = [state.get("orbit") or {} for state in info.get("internal_states") or ()]
        versions = {state.get("version") for state in states}
        targets = info.get("lora_target_modules")
        self._ranks = int(info.get("tp_size") or 1)
        return About(
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
        if self._method == "Folder":
            await self._wire.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
            return
        files = adapter.files
        # SGLang's own format for this endpoint; it unpickles nothing but tensors, and we unpickle nothing of its.
        tensors = pickle.dumps(dict(tensorfile.parse(files[MODEL_FILE], where=MODEL_FILE)))
        body = {
            "lora_name": name,
            "config_dict": json.loads(bytes(files[CONFIG_FILE])),
            # Each of the server's processes takes the one of its number, and cuts out its part by itself.
            "serialized_named_tensors": [base64.b64encode(tensors).decode()] * self._ranks,
        }
        await self._wire.post("/load_lora_adapter_from_tensors", body)

    async def unload(self, name: str) -> None:
        await self._wire.post("/unload_lora_adapter", {"lora_name": name})

    async def generate(self, call: Call, eos: Sequence[int]) -> list[Sampled]:
        sampling, prompts = call.first.sampling, call.prompts
        parameters: Any = {
            "n": len(call.requests) // len(prompts),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_new_tokens": sampling.max_new_tokens,
            "stop": list(sampling.stop),
            "stop_token_ids": list(eos),
        }
        if self._deterministic:
            # The n samples of one entry share its seed, and with it all their tokens.
            prompts = [list(request.prompt_ids_T) for request in call.requests]
            seeds = [_signed(request.key) for request in call.requests]
            parameters = [parameters | {"n": 1, "sampling_seed": seed} for seed in seeds]
        several = self._deterministic or len(prompts) > 1
        body = {
            "input_ids": prompts if several else prompts[0],
            "sampling_params": parameters,
            "return_logprob": True,
            "lora_path": [call.first.adapter] * len(prompts) if several else call.first.adapter,
        }
        answers = await self._wire.post("/generate", body)
        found = []
        for answer in answers if isinstance(answers, list) else [answers]:
            meta = _meta(answer)
            entries = meta.get("output_token_logprobs") or []
            reason = (meta.get("finish_reason") or {}).get("type")
            found.append(check_sampled(call, [entry[1] for entry in entries], [entry[0] for entry in entries], reason))
        return found

    async def score(
        self, token_ids_T: Sequence[int], adapters: Sequence[str | None], behind: int | None = None
    ) -> list[Scored]:
        """SGLang takes from its cache what lies before a reading's start, and computes the rest."""
        starts = [0] if behind is None else [0, behind]
        # Neighbours with one adapter are one product of the server's.
        asked = [(adapter, start) for adapter in adapters for start in starts]
        body = {
            "input_ids": [list(token_ids_T)] * len(asked),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": [start for _, start in asked],
            "lora_path": [adapter for adapter, _ in asked],
        }
        answers = await self._wire.post("/generate", body)
        if not isinstance(answers, list) or len(answers) != len(asked):
            raise GateError(f"/generate was not answered with {len(asked)} readings", where="rollout")
        found = [
            _read_end(_meta(answer), list(token_ids_T[start:]))
            for answer, (_, start) in zip(answers, asked, strict=True)
        ]
        whole = found[:: len(starts)]
        ends = [None] * len(adapters) if behind is None else found[1::2]
        return [Scored((0.0, *each.logprobs_T), None, end) for each, end in zip(whole, ends, strict=True)]

    async def facts(self) -> Mapping[str, Mapping[str, Any]] | None:
        states = (await self._wire.get("/server_info")).get("internal_states") or ()
        if not states or any("orbit" not in state for state in states):
            return None
        return merge_facts([state["orbit"] for state in states])

    async def sleep(self, parts: Sequence[Sleeping]) -> None:
        # It ends its scheduler where something still runs; emptying the cache waits for that.
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
    """By adapter, what the plug-in told in each rank; what two tell differently is None, which equals no digest."""
    merged: dict[str, dict[str, Any]] = {}
    for state in states:
        if "error" in state:
            raise GateError(f"the plug-in cannot read the engine's slots: {state['error']}", where="publish")
        for name, facts in state["adapters"].items():
            before = merged.setdefault(name, facts)
            merged[name] = {key: value if before.get(key) == value else None for key, value in facts.items()}
    return merged


def _read_end(meta: Mapping[str, Any], asked: Sequence[int]) -> Cached:
    entries = meta.get("input_token_logprobs") or []
    if [int(entry[1]) for entry in entries] != asked:
        raise GateError("the engine scored other tokens than it was given", where="rollout")
    return Cached(tuple(number(entry[0]) for entry in entries[1:]), int(meta.get("cached_tokens") or 0))


def _signed(key: int) -> int:
    """The same 64 bits as SGLang takes a seed: within int64 (0.5.23: `sampling_params.py`), whose bits it hashes."""
    return key - 2**64 if key >= 2**63 else key


def _meta(answer: Any) -> dict[str, Any]:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise GateError("/generate was answered without meta_info", where="rollout")
    return meta
