"""Numbers that no checkpoint and no manifest says, each with where it comes from.

Belongs here: constants of libraries and of our own loops. A test compares those of our loops with the code.
"""

from __future__ import annotations

GIB = 2**30
MIB = 2**20

CONTEXT_BYTES = int(0.75 * GIB)
"""A process on a GPU: CUDA context, cuBLAS workspace, loaded kernels."""
NCCL_BYTES = 1 * GIB
"""Buffers of the communicators of one process, where there are several GPUs."""
GRAPH_BYTES = int(2.5 * GIB)
"""SGLang's captured decode graphs."""
RESERVE_FRACTION = 0.02
"""Of the GPU: what an allocator cannot hand out because it is in pieces."""

HOST_PROCESS_BYTES = int(0.7 * GIB)
"""A Python process that has imported torch and transformers."""
HOST_RANK_BYTES = 4 * GIB
"""A process that drives a GPU: the same, CUDA's share, and pinned staging buffers."""
DOWNLOAD_BYTES_PER_SECOND = 1.0e9
"""What a node's network and an object store give together; the time is an estimate."""

DENSE_BYTES = {"cpu": 16 * MIB, "cuda": 256 * MIB}
"""Most bytes that a frozen linear dequantises at a time: `quant.linear.DENSE_BYTES_LIMIT`."""
EXPERT_DENSE_BYTES = 1 * GIB
"""Most bytes of experts that are dequantised at a time on a GPU; transformers' own budget as well."""
LOGIT_ELEMENTS = 1 << 24
"""Elements of one chunk of logits: `policy.logprobs.CHUNK_ELEMENTS`."""
LOGIT_COPIES = 3
"""Chunks alive at once: logits, their log-softmax, its gradient. All fp32."""
PREFILL_TOKENS = {"Torch": 16384, "SGLang": 8192}
"""Prompt tokens of one prefill pass: `rollout.decoding.PREFILL_TOKENS`, SGLang's `chunked_prefill_size`."""
ADAPTER_VERSIONS = 2
"""Policy versions in an engine while a new one is published: that one, and the one that samples until then."""
SERVER_SLOTS = ADAPTER_VERSIONS + 2
"""Of an SGLang server, which takes memory for all of them at its start: one more for preflight's random adapter, and
one that holds nothing, for the bare base."""
MASTER_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4
"""Per adapter parameter: fp32 master, Adam's two moments, fp32 gradient."""
ROTATION_GRAPH_BYTES = 12
"""Per element of OFT's R while a pass runs: Q and its second and third powers in fp32, for the five-term series."""
CHECKPOINT_BYTES = 12
"""Per adapter parameter in a checkpoint: fp32 master and Adam's moments."""
