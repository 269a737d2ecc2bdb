"""Sampling: the torch engine against transformers' `generate`, with equal lengths and with long-tailed ones.

Belongs here: both sides on one model, taking turns. Does not belong here: how either samples.

transformers runs at its best: KV cache, fp32 and SDPA as here, all requests in one batch (prompts have one length, so
nothing is padded), no top-k. Only Orbit's side also returns the log-prob of every token; both return text.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Measured, compare, run, table
from benchmarks.long_tail import MAX_NEW_TOKENS, build_model_folder
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.policy.load import load_policy
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.torch_engine import TorchEngine
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Request, Sampling

MEASURES = ("orbit_runtime/rollout", "orbit_runtime/policy", "orbit_runtime/adapters", "orbit_runtime/quant")
EQUAL_REQUESTS, EQUAL_TOKENS = 64, 64
LONG_TAILED_REQUESTS = 256


class Endless:
    """The model's tokenizer without an end token: every answer has the requested length."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_ids: tuple[int, ...] = ()

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def encode_chat(self, messages: Any) -> list[int]:
        return self._tokenizer.encode_chat(messages)


def measure(options: argparse.Namespace) -> Measured:
    comparisons = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = build_model_folder(Path(temporary) / "long-tail")
        tokenizer = ChatTokenizer(folder)
        policy = load_policy(folder, AdapterConfig(type="LoRA", targets=("q_proj",)))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    torch.manual_seed(0)
    messages = [[{"role": "user", "content": f"{10 + n % 90}+{10 + n // 90}="}] for n in range(LONG_TAILED_REQUESTS)]
    prompts = tokenizer.encode_many(messages)
    assert len({len(prompt) for prompt in prompts}) == 1
    calls = 0
    tokens: dict[str, list[int]] = {}

    def orbit(engine: TorchEngine, count: int, new_tokens: int, name: str) -> None:
        nonlocal calls
        calls += 1
        sampling = Sampling(max_new_tokens=new_tokens)
        requests = [
            Request(index, stream_key(0, "benchmark", calls, index), tuple(prompt), sampling, None)
            for index, prompt in enumerate(prompts[:count])
        ]
        completions = list(sample(engine, requests))
        tokens.setdefault(f"{name}, Orbit", []).append(sum(len(each.token_ids_T) for each in completions))

    @torch.inference_mode()
    def generate(count: int, new_tokens: int, ends: list[int] | None, name: str) -> None:
        model.generation_config.eos_token_id = ends
        input_ids = torch.tensor(prompts[:count])
        answers = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            use_cache=True,
        )[:, input_ids.shape[1] :]
        rows = answers.tolist()
        lengths = [next((at + 1 for at, token in enumerate(row) if token in (ends or ())), len(row)) for row in rows]
        for row, length in zip(rows, lengths, strict=True):
            tokenizer.decode(row[:length])
        tokens.setdefault(f"{name}, transformers", []).append(sum(lengths))

    equal, long_tailed = (EQUAL_REQUESTS, EQUAL_TOKENS), (LONG_TAILED_REQUESTS, MAX_NEW_TOKENS)
    if options.smallest:
        equal, long_tailed = (4, 4), (8, 8)
    for name, (count, new_tokens), target, ends in (
        (f"generation, {equal[0]} requests, {equal[1]} tokens", equal, 1.5, None),
        (f"generation, {long_tailed[0]} requests, up to {long_tailed[1]}", long_tailed, 2.5, list(tokenizer.eos_ids)),
    ):
        used = tokenizer if ends else Endless(tokenizer)
        engine = TorchEngine(policy, used, max_running_requests=count)  # type: ignore[arg-type]
        row = compare(
            name,
            ("Orbit", lambda e=engine, c=count, n=new_tokens, w=name: orbit(e, c, n, w)),
            ("transformers", lambda c=count, n=new_tokens, s=ends, w=name: generate(c, n, s, w)),
            repetitions=options.repetitions,
            target=target,
        )
        comparisons.append(row)
    tokens_a_call = {name: sum(counts) / len(counts) for name, counts in tokens.items()}
    print(table(comparisons))
    for name, mean in tokens_a_call.items():
        print(f"{name}: {mean:.0f} tokens a call")
    return Measured(comparisons, {"tokens_a_call": tokens_a_call})


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure))
