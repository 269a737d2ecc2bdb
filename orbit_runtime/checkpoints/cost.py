"""Cost of a merge: log-probs of the merged model against those of base and adapter, on its own completions.

The merged model completes the prompts; both models score the sampled tokens. With d = logp(base + adapter) -
logp(merged), the mean of exp(d) - 1 - d estimates KL(merged || base + adapter).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.inject import AdaptedLayer
from orbit_runtime.adapters.layer import Slot
from orbit_runtime.adapters.lora import LoRASlot
from orbit_runtime.adapters.oft import OFTSlot
from orbit_runtime.checkpoints.combine import EVERY, CombinedAdapter, Rotation, side_A, side_B
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.parity.statistics import Difference, build_difference
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.requests import sample
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Request, Sampling

SLOT = "merged"
NEW_TOKENS = 32
"""Tokens sampled for each prompt."""
PROMPTS = (
    "What is 17 + 26? Answer with the number only.",
    "Write a function in Python that reverses a list.",
    "Name three rivers in Africa.",
    "Translate to French: the weather is fine today.",
    "A train covers 120 km in 90 minutes. What is its speed?",
    "Why is the sky blue? One sentence.",
    "Continue: it was a dark and stormy night,",
    "Sort these numbers: 9, 4, 7, 1.",
)
"""Used if no prompts are given."""


@dataclass(frozen=True, slots=True)
class Cost:
    difference: Difference
    prompts: int
    new_tokens: int


def measure(base: Path, merged: Path, combined: CombinedAdapter, prompts: Sequence[str], *, seed: int = 0) -> Cost:
    """Measures the cost. Only one model is loaded at a time, so memory must hold one of them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = ChatTokenizer(merged)
    ids = tokenizer.encode_many([[{"role": "user", "content": prompt}] for prompt in prompts])
    # An adapter is part of every policy; that of the merged model stays off.
    off = _off(combined)
    longest = max(map(len, ids)) + NEW_TOKENS
    policy = _load(merged, off, device, longest)
    engine = TorchEngine(policy, tokenizer, max_running_requests=len(ids))
    sampling = Sampling(max_new_tokens=NEW_TOKENS)
    requests = [
        Request(number, stream_key(seed, "merge-cost", number), tuple(prompt), sampling, None)
        for number, prompt in enumerate(ids)
    ]
    answers = {each.request_id: each.token_ids_T for each in sample(engine, requests)}
    branches = [Branch(number, ids[number], answers[number]) for number in sorted(answers) if answers[number]]
    of_merged = _logprobs(policy, branches, None)
    del policy, engine
    gc.collect()
    policy = _load(base, off, device, longest)
    for name, layer in policy.injected.layers.items():
        layer.slots[SLOT] = _slot(combined, name, layer)
    of_adapter = _logprobs(policy, branches, SLOT)
    return Cost(build_difference(of_adapter, of_merged), len(branches), sum(len(b.continuation_T) for b in branches))


def _load(folder: Path, adapter: AdapterConfig, device: str, longest: int) -> Policy:
    compute_dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return load_policy(folder, adapter, device=device, compute_dtype=compute_dtype, longest=longest)


def _off(combined: CombinedAdapter) -> AdapterConfig:
    """The smallest adapter of the type and layers: layers of experts apply slots of their own type only."""
    targets = tuple(sorted(combined.layers()))
    if combined.type == "LoRA":
        return AdapterConfig("LoRA", targets, rank=1, alpha=1.0, experts="Shared")
    size = next(iter(combined.rotation.values())).size
    return AdapterConfig("OFT", targets, block_size=size, experts="Shared")


def _slot(combined: CombinedAdapter, name: str, layer: AdaptedLayer) -> Slot:
    """The slot on the layer's device, in its compute dtype; `[E or 1, …]` for a layer of experts."""
    dtype = layer.selection.compute_dtype

    def stacked(held: set[int], value: Callable[[int], Tensor]) -> Tensor:
        if name not in combined.experts:
            return value(EVERY).to(layer.device, dtype)
        experts = range(layer.part.num_experts) if held - {EVERY} else (EVERY,)
        return torch.stack([value(expert).to(layer.device, dtype) for expert in experts])

    if name in combined.rotation:
        rotation = combined.rotation[name]
        return OFTSlot(stacked(rotation.experts(), lambda expert: _rotation(rotation, expert)))
    parts = combined.lora[name]
    of_A = {expert for part in parts for expert in part.lora_A}
    of_B = {expert for part in parts for expert in part.lora_B}
    A = stacked(of_A, lambda expert: side_A(parts, expert))
    B = stacked(of_B, lambda expert: side_B(parts, expert))
    return LoRASlot(A, B, 1.0)


def _rotation(rotation: Rotation, expert: int) -> Tensor:
    """R, or the identity for an expert that no adapter covers."""
    R = rotation.at(expert)
    if R is None:
        (features,) = rotation.features()
        return torch.eye(rotation.size).expand(features // rotation.size, -1, -1)
    return R


def _logprobs(policy: Policy, branches: Sequence[Branch], slot: str | None) -> list[float]:
    values: list[float] = []
    with torch.no_grad(), policy.injected.selection.use(slot):
        for branch in branches:
            found, _ = policy.logprobs(policy.pack([branch]))
            values += found.tolist()
    return values
