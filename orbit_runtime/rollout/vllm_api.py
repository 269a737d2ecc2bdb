"""Client of vLLM's OpenAI server: token ids in, token ids and log-probs out, adapters loaded at run time.

Belongs here: vLLM's endpoints and fields. Does not belong here: HTTP (`wire`), SGLang (`sglang_api`).

vLLM must be started with `--enable-lora`, `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` and, if sampling settings change the
model's own distribution, `--logprobs-mode processed_logprobs`: otherwise its log-probs are under the unchanged one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from orbit_runtime.adapters.files import adapter_bytes
from orbit_runtime.errors import GateError, UnsupportedError
from orbit_runtime.rollout.requests import end_ids
from orbit_runtime.rollout.server_types import (
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
from orbit_runtime.rollout.wire import Wire, adapter_names, exposition
from orbit_runtime.types import AdapterFiles, Scored

HEALTH_SECONDS = 60.0
"""vLLM's `/health` asks its engine process."""
COLD = 0.25
"""A temperature at which log-probs differ clearly depending on whether it was applied."""


class VllmApi:
    """The interface of vLLM 0.32."""

    takes_prompts = False
    ends_one = False

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._model = ""

    async def about(self) -> ServerFacts:
        version = str((await self._wire.get("/version"))["version"])
        base, *_ = [model for model in (await self._wire.get("/v1/models"))["data"] if not model.get("parent")]
        self._model = str(base["id"])
        return ServerFacts("vLLM", version, str(base.get("root") or self._model), max_tokens=base.get("max_model_len"))

    async def is_healthy(self) -> bool:
        return await self._wire.answers("/health", HEALTH_SECONDS)

    async def makes_progress(self) -> bool:
        return await self.is_healthy()

    async def names(self) -> frozenset[str]:
        return await adapter_names(self._wire)

    async def load(self, name: str, adapter: AdapterFiles, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        await self._wire.act("/v1/load_lora_adapter", body, num_bytes=adapter_bytes(adapter))

    async def unload(self, name: str) -> None:
        await self._wire.act("/v1/unload_lora_adapter", {"lora_name": name})

    async def stream(self, call: Call, eos: Sequence[int]) -> AsyncGenerator[TokenPiece]:
        sampling, first = call.first.sampling, call.asks[0]
        body = {
            "model": call.first.adapter or self._model,
            "prompt": first.input_T,
            "n": len(call.asks),
            "max_tokens": first.max_new_tokens,
            "stop_token_ids": list(end_ids(sampling, eos)),
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
            **given_fields(sampling),
        }
        async with aclosing(self._wire.stream("/v1/completions", body)) as events:
            async for event in events:
                for choice in event.get("choices") or ():
                    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
                    yield build_piece(
                        int(choice.get("index", 0)),
                        choice.get("token_ids") or [],
                        logprobs,
                        choice.get("finish_reason"),
                    )

    async def abort(self, rids: Sequence[str]) -> None:
        """Does nothing: vLLM cannot end single samples of a call; closing the stream ends them all."""

    async def score(
        self, token_ids_T: Sequence[int], adapters: Sequence[str | None], prefix_length: int | None = None
    ) -> list[Scored]:
        """One after the other: vLLM's CPU back end computes a request without adapter, batched with others, under
        whatever adapter its last slot holds (0.32; vllm-project/vllm#48421). `prefix_length` has no effect: nothing is
        read from a cache."""
        return [await self._score(token_ids_T, adapter) for adapter in adapters]

    async def likeliest(self, token_ids_T: Sequence[int], start: int, count: int) -> LikeliestTokens:
        """vLLM answers for the whole sequence, and with the sequence's own token beside the likeliest ones."""
        entries = await self._prompt_logprobs(token_ids_T, None, count)
        return from_rows([_by_rank(entry, count) for entry in entries[start:]], count)

    async def _prompt_logprobs(
        self, token_ids_T: Sequence[int], adapter: str | None, count: int
    ) -> list[Mapping[str, Mapping[str, Any]]]:
        """For each token of the sequence, token id → log-prob; nothing useful for the first. vLLM reads nothing from
        its cache for such a request.
        """
        body = {
            "model": adapter or self._model,
            "prompt": list(token_ids_T),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": count,
        }
        entries = (await self._choices(body))[0].get("prompt_logprobs") or []
        if len(entries) != len(token_ids_T):
            raise GateError(f"asked for {len(token_ids_T)} log-probs, the engine answered {len(entries)}")
        return list(entries)

    async def _score(self, token_ids_T: Sequence[int], adapter: str | None) -> Scored:
        entries = await self._prompt_logprobs(token_ids_T, adapter, 1)
        found = []
        for token, entry in zip(token_ids_T[1:], entries[1:], strict=True):
            if not entry or str(token) not in entry:
                raise GateError("the engine scored other tokens than it was given", where="rollout")
            found.append(number(entry[str(token)]["logprob"]))
        return Scored((0.0, *found), None, top_T=_read_top(entries))

    async def facts(self, num_bytes: int = 0) -> Mapping[str, Mapping[str, Any]] | None:
        return None

    async def sleep(self, parts: Sequence[Sleeping]) -> None:
        raise NotImplementedError("Orbit starts no vLLM, and only its own servers sleep")

    async def wake(self, parts: Sequence[Sleeping]) -> None:
        raise NotImplementedError("Orbit starts no vLLM, and only its own servers sleep")

    async def exposition(self) -> str:
        return await exposition(self._wire)

    async def text(self, token_ids_T: Sequence[int]) -> str | None:
        """vLLM includes special tokens in the text, so the caller passes none."""
        body = {"model": self._model, "tokens": list(token_ids_T)}
        return str((await self._wire.post("/detokenize", body))["prompt"])

    async def check_processed(self, token_ids_T: Sequence[int], shaping: Sequence[str]) -> None:
        """Raises UnsupportedError (78) if the server reports log-probs from before the sampling settings.

        One server mode governs all settings, so the temperature shows it.

        Args:
            shaping: the settings that need it, by their names in the manifest.
        """
        seen = []
        for temperature in (1.0, COLD):
            body = {
                "model": self._model, "prompt": list(token_ids_T), "max_tokens": 1, "temperature": temperature,
                "logprobs": 1, "seed": 0,
            }  # fmt: skip
            top = ((await self._choices(body))[0].get("logprobs") or {}).get("top_logprobs") or [{}]
            seen.append(max((value for value in top[0].values()), default=0.0))
        if abs(seen[0] - seen[1]) < 1e-6:
            raise UnsupportedError(
                "this vLLM reports log-probs from before the temperature is applied",
                where=f"spec.rollout.sampling.{shaping[0]}",
                fix=f"start it with --logprobs-mode processed_logprobs, or remove {' and '.join(shaping)}",
            )

    async def _choices(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        answer = await self._wire.post("/v1/completions", body)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or not choices:
            raise GateError("/v1/completions was answered without choices", where="rollout")
        return choices


def _by_rank(entry: Any, count: int) -> list[tuple[Any, int]]:
    """Log-probs and ids of the tokens of rank 1 to `count`; what is no such token is left out."""
    told = entry.items() if isinstance(entry, dict) else ()
    of_rank = {
        each["rank"]: (each.get("logprob"), int(token))
        for token, each in told
        if isinstance(each, dict) and each.get("rank") in range(1, count + 1) and token.isdecimal()
    }
    return [of_rank[rank] for rank in sorted(of_rank)]


def _read_top(entries: Sequence[Mapping[str, Mapping[str, Any]]]) -> tuple[int, ...] | None:
    """vLLM reports each token's rank; the token of rank 1 is the sequence's own or listed beside it."""
    top = [next((int(token) for token, told in entry.items() if told.get("rank") == 1), None) for entry in entries[1:]]
    found = tuple(token for token in top if token is not None)
    return (-1, *found) if len(found) == len(top) else None
