"""Attention of one layer over a long packed micro-batch, forward and backward: chunks against the fused kernel.

Two answers share a prompt of an eighth of the tokens, so that the fused kernel needs a mask. Each kernel has a process
of its own per turn. Memory is the process's peak above what it held before the pass; on a CUDA device, that of its
allocator. The largest difference of results and gradients is reported beside that of the fused kernel from the explicit
products.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Comparison, Measured, run
from orbit_runtime.policy.attention import AttentionSettings
from orbit_runtime.policy.packed import Branch, PackedBatch, PackedPlan, build_packed

MEASURES = ("orbit_runtime/policy/packed.py", "orbit_runtime/policy/attention.py", "orbit_runtime/policy/chunked.py")
KERNELS = ("SDPA", "Chunked")


def pack(tokens: int, device: torch.device) -> PackedBatch:
    prompt = tokens // 8
    answer = (tokens - prompt) // 2
    return build_packed([Branch(0, [1] * prompt, [2] * (answer + 1)) for _ in range(2)], device)


def make_inputs(options: argparse.Namespace, tokens: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = (options.heads, options.kv_heads, options.kv_heads)
    made = (torch.randn(tokens, count, options.head_size, generator=generator) for count in heads)
    return [x.to(device, dtype).requires_grad_() for x in made]


def attend(kernel: str, batch: PackedBatch, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result and the gradients of a weighted sum of it."""
    look = AttentionSettings(inputs[0].shape[-1] ** -0.5)
    out = PackedPlan(batch, kernel).attend_tokens(0, *inputs, look)  # type: ignore[call-arg, arg-type]
    slope = torch.linspace(-1.0, 1.0, out.shape[-1], device=out.device, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad((out * slope).sum(), inputs)]


def measure_one(kernel: str, options: argparse.Namespace) -> dict[str, float]:
    """In a process of its own; runs a short pass first, so that one-time allocations are not counted."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    few = pack(64, device)
    attend(kernel, few, make_inputs(options, len(few.token_ids_T), device))
    batch = pack(options.tokens, device)
    inputs = make_inputs(options, len(batch.token_ids_T), device)
    before = _most(device)
    start = time.perf_counter()
    attend(kernel, batch, inputs)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - start, "bytes": _most(device) - before}


def _most(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_a_process(kernel: str, options: argparse.Namespace) -> dict[str, float]:
    told = {name: getattr(options, name) for name in ("tokens", "heads", "kv_heads", "head_size")}
    program = [sys.executable, __file__, "--one", kernel, json.dumps(told)]
    found: dict[str, float] = json.loads(subprocess.run(program, check=True, capture_output=True, text=True).stdout)
    return found


def differences(options: argparse.Namespace) -> dict[str, float]:
    """The largest over result and gradients, at 2048 tokens at most: the explicit products need all scores at once."""
    batch = pack(min(options.tokens, 2048), torch.device("cpu"))
    inputs = make_inputs(options, len(batch.token_ids_T), torch.device("cpu"))
    found = {kernel: attend(kernel, batch, inputs) for kernel in ("Eager", *KERNELS)}

    def apart(one: str, other: str) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(found[one], found[other], strict=True))

    return {"Chunked from SDPA": apart("Chunked", "SDPA"), "SDPA from Eager": apart("SDPA", "Eager")}


def measure(options: argparse.Namespace) -> Measured:
    if options.smallest:
        options.tokens = 256
    turns = [{kernel: in_a_process(kernel, options) for kernel in KERNELS} for _ in range(options.repetitions)]
    memory = {kernel: max(turn[kernel]["bytes"] for turn in turns) for kernel in KERNELS}
    seconds = {kernel: statistics.median(turn[kernel]["seconds"] for turn in turns) for kernel in KERNELS}
    ratio = statistics.median(turn["SDPA"]["seconds"] / turn["Chunked"]["seconds"] for turn in turns)
    for kernel in KERNELS:
        print(f"{kernel:8} {seconds[kernel]:9.3f} s {memory[kernel] / 2**20:10.1f} MiB above")
    row = Comparison(
        f"attention, {options.tokens} tokens, forward + backward", "Chunked", "SDPA", seconds["Chunked"],
        seconds["SDPA"], ratio, None, options.repetitions,
    )  # fmt: skip
    figures: dict[str, Any] = {"bytes_above": memory, "largest_difference": differences(options)}
    facts = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, one thread",
        "heads": [options.heads, options.kv_heads, options.head_size],
    }
    return Measured([row], figures, facts)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--head-size", type=int, default=64)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure_one(sys.argv[2], argparse.Namespace(**json.loads(sys.argv[3])))))
    else:
        raise SystemExit(run(__file__, __doc__, measure, repetitions=3, add_options=add_options))
