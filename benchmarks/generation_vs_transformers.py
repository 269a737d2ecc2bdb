"""Sampling: the torch engine against transformers' `generate`, with equal lengths and with long-tailed ones; or with
equal ones on a pretrained model, transformers in fp32 and in BF16, and where `ORBIT_SGLANG_PYTHON` is set SGLang's CPU
server in BF16, with room for adapters.

Belongs here: both sides on one model, taking turns. Does not belong here: how either samples.

transformers runs at its best: KV cache, SDPA, tiny models in fp32 as here, all requests in one batch (prompts have one
length, so nothing is padded), no top-k. Only Orbit's side also returns the log-prob of every token; both return text.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Comparison, Measured, add_model_option, compare, pass_seconds, real_model, run, table
from benchmarks.long_tail import MAX_NEW_TOKENS, build_model_folder
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.policy.load import load_policy, widen
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.served_engine import ServedEngine, start_engine
from orbit_runtime.rollout.sglang_server import ServerSettings, SGLangServer
from orbit_runtime.rollout.torch_engine import TorchEngine
from orbit_runtime.rollout.transport import FolderMailbox
from orbit_runtime.seeds import stream_key
from orbit_runtime.sides.machine import machine_facts
from orbit_runtime.types import Request, Sampling
from orbit_runtime.workers.servers.process import PYTHON_VARIABLE

MEASURES = ("orbit_runtime/rollout", "orbit_runtime/policy", "orbit_runtime/adapters", "orbit_runtime/quant")
EQUAL_REQUESTS, EQUAL_TOKENS = 64, 64
LONG_TAILED_REQUESTS = 256
SAMPLES = {"do_sample": True, "temperature": 1.0, "top_k": 0, "use_cache": True}
"""How transformers generates."""


class Endless:
    """The model's tokenizer without an end token: every answer has the requested length."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_ids: tuple[int, ...] = ()

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def encode_chat(self, messages: Any) -> list[int]:
        return self._tokenizer.encode_chat(messages)


def against_sglang(
    folder: Path, tokenizer: ChatTokenizer, count: int, name: str, ask: Callable[[Any], None], own: TorchEngine,
    repetitions: int,
) -> Comparison:  # fmt: skip
    """Args: ask: has an engine answer."""
    settings = ServerSettings(
        model=folder, device="cpu", dtype="bfloat16", targets=("q_proj", "v_proj"), max_running_requests=count,
        max_sequence_length=256, seed=0, lora_rank=16,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        server = SGLangServer(settings, log=Path(temporary) / "sglang.log")
        desk = FolderMailbox(Path(temporary) / "adapters", None)
        served = start_engine([server], tokenizer, desk=desk, max_running_requests=count)
        try:
            sides = ("Orbit", partial(ask, own)), ("SGLang's CPU server, bfloat16", partial(ask, served))
            return compare(name, *sides, repetitions=max(1, repetitions // 2), target=5.0)
        finally:
            served.close()


def measure(options: argparse.Namespace) -> Measured:
    comparisons = []
    is_real = options.model == "real"
    temporary = tempfile.TemporaryDirectory()
    folder = real_model() if is_real else build_model_folder(Path(temporary.name) / "long-tail")
    tokenizer = ChatTokenizer(folder)
    dtype = torch.bfloat16 if is_real and machine_facts().multiplies_bf16 else torch.float32
    policy = widen(load_policy(folder, AdapterConfig(type="LoRA", targets=("q_proj",)), compute_dtype=dtype))
    models = {
        f"transformers, {each}" if is_real else "transformers": AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, each), attn_implementation="sdpa"
        ).eval()
        for each in (("float32", "bfloat16") if is_real else ("float32",))
    }
    torch.manual_seed(0)
    messages = [[{"role": "user", "content": f"{10 + n % 90}+{10 + n // 90}="}] for n in range(LONG_TAILED_REQUESTS)]
    prompts = tokenizer.encode_many(messages)
    assert len({len(prompt) for prompt in prompts}) == 1
    calls, tokens = 0, dict[str, list[int]]()

    def orbit(engine: TorchEngine | ServedEngine, count: int, new_tokens: int, name: str) -> None:
        nonlocal calls
        calls += 1
        sampling = Sampling(max_new_tokens=new_tokens, ignore_eos=isinstance(engine, ServedEngine))
        requests = [
            Request(index, stream_key(0, "benchmark", calls, index), tuple(prompt), sampling, None)
            for index, prompt in enumerate(prompts[:count])
        ]
        completions = list(sample(engine, requests))
        tokens.setdefault(f"{name}, Orbit", []).append(sum(len(each.token_ids_T) for each in completions))

    @torch.inference_mode()
    def generate(count: int, new_tokens: int, ends: list[int] | None, name: str, other: str) -> None:
        model = models[other]
        model.generation_config.eos_token_id = ends
        input_ids = torch.tensor(prompts[:count])
        answers = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=new_tokens,
            **SAMPLES,
        )[:, input_ids.shape[1] :]
        rows = answers.tolist()
        lengths = [next((at + 1 for at, token in enumerate(row) if token in (ends or ())), len(row)) for row in rows]
        for row, length in zip(rows, lengths, strict=True):
            tokenizer.decode(row[:length])
        tokens.setdefault(f"{name}, {other}", []).append(sum(lengths))

    def least(name: str, count: int) -> float:
        """Seconds of the useful work of a call: each prompt and each token once, as many rows as requests."""
        prefill = pass_seconds(folder, count * len(prompts[0]), count)
        return prefill + statistics.mean(tokens[name]) / count * pass_seconds(folder, count, count)

    equal, long_tailed = (EQUAL_REQUESTS, EQUAL_TOKENS), (LONG_TAILED_REQUESTS, MAX_NEW_TOKENS)
    if options.smallest:
        equal, long_tailed = (4, 4), (8, 8)
    shapes: list[tuple[str, tuple[int, int], float, list[int] | None]] = [
        (f"generation, {equal[0]} requests, {equal[1]} tokens", equal, 3.0 if is_real else 1.5, None),
        (f"generation, {long_tailed[0]} requests, up to {long_tailed[1]}", long_tailed, 2.5, list(tokenizer.eos_ids)),
    ]
    for (name, (count, new_tokens), target, ends), other in product(shapes[:1] if is_real else shapes, models):
        used = tokenizer if ends else Endless(tokenizer)
        engine = TorchEngine(policy, used, max_running_requests=count)  # type: ignore[arg-type]
        row = compare(
            name,
            ("Orbit", lambda e=engine, c=count, n=new_tokens, w=name: orbit(e, c, n, w)),
            (other, lambda c=count, n=new_tokens, s=ends, w=name, o=other: generate(c, n, s, w, o)),
            repetitions=options.repetitions,
            target=target,
        )
        comparisons.append(replace(row, least=(least(f"{name}, Orbit", count), least(f"{name}, {other}", count))))
    if is_real and os.environ.get(PYTHON_VARIABLE):
        ask = partial(orbit, count=count, new_tokens=new_tokens, name=name)
        comparisons.append(against_sglang(folder, tokenizer, count, name, ask, engine, options.repetitions))
    tokens_a_call = {name: sum(counts) / len(counts) for name, counts in tokens.items()}
    print(table(comparisons))
    for name, mean in tokens_a_call.items():
        print(f"{name}: {mean:.0f} tokens a call")
    temporary.cleanup()
    return Measured(comparisons, {"tokens_a_call": tokens_a_call}, variant="real" if is_real else "")


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure, add_model_option))
