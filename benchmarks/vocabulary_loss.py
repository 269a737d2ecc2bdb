"""Log-probs, entropy and their gradient at a vocabulary of 160,000: peak memory by chunk size, and with whole logits.

    python -m benchmarks.vocabulary_loss

Each size runs in a process of its own, so that its allocator holds nothing of another: the peak, sampled every half
millisecond, of memory that is not backed by a file, above what the process held before. Large blocks go back to the
system when they are freed, so that what the allocator keeps for later does not count. The twin is a trainer without
chunks: `hidden @ head.T`, `log_softmax`, `gather`, backward, with PyTorch's own operations.

Belongs here: memory and time of the output layer. Does not belong here: whether both give the same numbers
(`tests/integration/test_policy.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Measured, PeakMemory, run

MEASURES = ("orbit_runtime/policy/logprobs.py",)
VOCABULARY, HIDDEN, TOKENS = 160_000, 256, 512
"""More tokens than the largest chunk holds, so that it is a chunk; the hidden size is in none of the large tensors."""
CHUNKS = (1 << 22, 1 << 23, 1 << 24, 1 << 25)
"""Elements of one chunk's logits; the third is the default."""
WHOLE = "whole"
FP32 = 4
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Larger blocks are mappings of their own."""
TENSORS = 4
"""Number of tensors of a chunk's size that may be alive at once: it gives the bound on memory."""


def one(chunk: str, tokens: int, vocabulary: int) -> dict[str, float]:
    """In a process of its own: bytes and seconds of a forward and backward pass."""
    import torch

    from orbit_runtime.policy.logprobs import token_logprobs

    generator = torch.Generator().manual_seed(0)
    head_VN = torch.randn(vocabulary, HIDDEN, generator=generator).mul_(0.02).bfloat16()
    hidden_RN = torch.randn(tokens, HIDDEN, generator=generator).bfloat16().requires_grad_(True)
    targets_R = torch.randint(vocabulary, (tokens,), generator=generator)

    def head(rows_RN: Any) -> Any:
        return rows_RN @ head_VN.T

    def chunked(count: int) -> None:
        logprobs, _ = token_logprobs(
            hidden_RN[:count], targets_R[:count], head, vocabulary=vocabulary, chunk_elements=int(chunk)
        )
        logprobs.sum().backward()

    def whole(count: int) -> None:
        every = torch.log_softmax(head(hidden_RN[:count]).float(), dim=-1)
        with torch.no_grad():
            (every.exp() * every).sum(-1)
        every.gather(-1, targets_R[:count, None]).sum().backward()

    work = whole if chunk == WHOLE else chunked
    # One-time setup in the first product of this kind does not count.
    work(1)
    started = time.perf_counter()
    with PeakMemory() as peak:
        work(tokens)
    return {"bytes": max(0, peak.above), "seconds": time.perf_counter() - started}


def measure(options: argparse.Namespace) -> Measured:
    tokens, vocabulary = (64, 4096) if options.smallest else (TOKENS, VOCABULARY)
    chunks = [each // 512 for each in CHUNKS] if options.smallest else list(CHUNKS)
    memory: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for name in [*map(str, chunks), WHOLE]:
        words = [sys.executable, __file__, "--one", name, str(tokens), str(vocabulary)]
        done = subprocess.run(words, check=True, capture_output=True, text=True, env=os.environ | AT_ONCE)
        found = json.loads(done.stdout)
        memory[name], seconds[name] = found["bytes"] / 2**20, found["seconds"]
        print(f"{name:>12} elements: {memory[name]:>9.1f} MiB {seconds[name]:>8.2f} s")
    over = {
        str(each): memory[str(each)] / (each * FP32 / 2**20) for each in chunks if not options.smallest
    }  # fmt: skip
    refused = [name for name, times in over.items() if times > TENSORS]
    return Measured(
        figures={"MiB": memory, "seconds": seconds, **({"chunks of logits": over} if over else {})},
        facts={"tokens": tokens, "vocabulary": vocabulary, "hidden": HIDDEN, "most chunks at a time": TENSORS,
               "MiB of [tokens, vocabulary] in fp32": tokens * vocabulary * FP32 / 2**20},
        refused=f"more than {TENSORS} chunks of logits at a time: {', '.join(refused)}" if refused else "",
    )  # fmt: skip


if __name__ == "__main__":
    if "--one" in sys.argv:
        print(json.dumps(one(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
    else:
        raise SystemExit(run(__file__, __doc__, measure))
