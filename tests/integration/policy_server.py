"""SGLang's API by hand over a real model: a `FakeServer` whose tokens and log-probs are the torch engine's.

Its draws follow from adapter, prompt and place in the call alone, so that two runs that ask the same get the same. What
a real SGLang does is in `tests/engines`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.files import files_digest
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import load_policy
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.requests import sample
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import AdapterFiles, Request, Sampling
from tests.fakes.fake_servers import Answer, Events, FakeServer

FILES = ("adapter_config.json", "adapter_model.safetensors", "rotations.safetensors")


class PolicyServer(FakeServer):
    """Serves the shipped model in INT4, with LoRA."""

    def __init__(self, *, plugin: bool = True) -> None:
        super().__init__(plugin=plugin)
        folder = builtin_folder("tiny-adder", "INT4")
        self._tokenizer = ChatTokenizer(folder)
        policy = load_policy(folder, AdapterConfig(type="LoRA", targets=(), rank=16, alpha=32.0))
        self._engine = TorchEngine(policy, self._tokenizer, max_running_requests=64)
        self._slots: dict[str, str] = {}
        """Slot of the engine, which takes no name twice, by adapter."""
        self._applied: dict[str, str | None] = {}
        self._turn = threading.Lock()
        self.serves_stale = False
        """Whether a name that is loaded gets the bytes that were loaded before."""
        self._newest: dict[str, bytes] = {}

    @property
    def port(self) -> int:
        return self._port

    def text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)

    def answer(self, path: str, body: dict) -> Answer:
        with self._turn:
            if path == "/generate" and not self.faults:
                return 200, self._samples(body) if body.get("stream") else self._scores(body)
            status, content = super().answer(path, body)
            if status == 200 and path == "/load_lora_adapter":
                self._load(body["lora_name"], Path(body["lora_path"]))
            if status == 200 and path == "/unload_lora_adapter":
                self._engine.unload_adapter(self._slots.pop(body["lora_name"]))
            if path == "/server_info" and self.plugin:
                content["internal_states"][0]["orbit"]["adapters"] = {name: self._facts(name) for name in self._slots}
            return status, content

    def start(self) -> None:
        # The process before may still compute an answer that nobody gets.
        with self._turn:
            for slot in self._slots.values():
                self._engine.unload_adapter(slot)
            self._slots.clear()
        super().start()

    def _load(self, name: str, folder: Path) -> None:
        files = {each: (folder / each).read_bytes() for each in FILES if (folder / each).exists()}
        files = self._newest = self._newest if self.serves_stale else files
        slot = f"{name}, load {len(self._applied)}"
        self._engine.load_adapter(slot, AdapterFiles(0, files, files_digest(files)))
        self._slots[name], self._applied[slot] = slot, None

    def _facts(self, name: str) -> dict[str, Any]:
        slot = self._slots[name]
        return {
            "path": str(self.held[name]), "slot": 1, "slot_digest": self._engine.adapter_digest(slot),
            "applied_digest": self._applied[slot], "difference": None,
        }  # fmt: skip

    def _scores(self, body: dict) -> list[dict]:
        columns = zip(body["input_ids"], body["lora_path"], body["logprob_start_len"], strict=True)
        return [self._score(*each) for each in columns]

    def _score(self, tokens: list[int], adapter: str | None, start: int) -> dict:
        slot = self._slots[adapter] if adapter else None
        (scored,) = self._engine.score(tokens, [slot])
        if slot:
            self._applied[slot] = scored.applied_digest
        assert scored.top_T is not None
        entries = [[value, token, None] for value, token in zip(scored.logprobs_T, tokens, strict=True)][start:]
        entries[0][0] = None
        top = [None, *([[0.0, token, None]] for token in scored.top_T[start + 1 :])]
        return {"meta_info": {"input_token_logprobs": entries, "input_top_logprobs": top, "cached_tokens": 0}}

    def _samples(self, body: dict) -> Events:
        requests = []
        columns = zip(body["input_ids"], body["lora_path"], body["sampling_params"], strict=True)
        for index, (tokens, adapter, given) in enumerate(columns):
            sampling = Sampling(max_new_tokens=given["max_new_tokens"], stop_token_ids=tuple(given["stop_token_ids"]))
            key = stream_key(index, f"{adapter}", sum((at + 1) * token for at, token in enumerate(tokens)))
            slot = self._slots[adapter] if adapter else None
            requests.append(Request(index, key, tuple(tokens), sampling, slot))
        ended = sorted(sample(self._engine, requests), key=lambda each: each.request_id)

        def events() -> Iterator[dict]:
            for rid, each in zip(body["rid"], ended, strict=True):
                pairs = zip(each.logprobs_T, each.token_ids_T, strict=True)
                entries = [[logprob, token, None] for logprob, token in pairs]
                meta = {"id": rid, "completion_tokens": len(entries), "output_token_logprobs": entries}
                yield {"index": each.request_id, "meta_info": {**meta, "finish_reason": {"type": each.finish_reason}}}

        return Events(events())
