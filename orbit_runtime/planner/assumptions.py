"""Numbers that are in no checkpoint and no manifest, each with its source.

A test compares those of our loops with the code.
"""

from __future__ import annotations

import math

GIB = 2**30
MIB = 2**20

CONTEXT_BYTES = int(0.75 * GIB)
"""Bytes for each process on a GPU: CUDA context, cuBLAS workspace, loaded kernels."""
BARE_CONTEXT_BYTES = int(0.5 * GIB)
"""CUDA context of a process that computes nothing: the run's own reads the free memory of GPUs that servers leave."""
NCCL_BYTES = 1 * GIB
"""Buffers of one process's communicators, if there are several GPUs."""
GRAPH_BYTES = 4 * GIB
"""SGLang's captured graphs: 2.5 GiB for decoding; 1.5 for prefill, which SGLang reserves for latent attention."""
RESERVE_FRACTION = 0.02
"""Fraction of a GPU's memory that the allocator loses to fragmentation."""
MARGIN_FRACTION = 0.05
"""Fraction of a GPU's memory that stays free unless it is one of `MEASURED_GPUS`."""
MEASURED_GPUS: frozenset[str] = frozenset()
"""Names of GPUs on which the memory of a run was compared with its plan."""

HOST_PROCESS_BYTES = int(0.7 * GIB)
"""A Python process that has imported torch and transformers."""
HOST_RANK_BYTES = 4 * GIB
"""A process that drives a GPU: `HOST_PROCESS_BYTES`, CUDA's share, and pinned staging buffers."""
DOWNLOAD_BYTES_PER_SECOND = 1.0e9
"""Download speed from an object store to a node; the resulting time is an estimate."""

DENSE_BYTES = {"cpu": 16 * MIB, "cuda": 256 * MIB}
"""Most bytes that a frozen linear dequantises at once: `quant.linear.DENSE_BYTES_LIMIT`."""
WIDENED_SHARE = 8
"""Linears are held dense in the compute dtype on a CPU if that takes at most one part of so many of its memory."""
EXPERT_DENSE_BYTES = 1 * GIB
"""Most bytes of experts that are dequantised at once on a GPU; also transformers' own budget."""
LOGIT_ELEMENTS = 1 << 24
"""Elements of one chunk of logits: `policy.logprobs.CHUNK_ELEMENTS`."""
LOGIT_COPIES = 3
"""Chunks alive at once: logits, their log-softmax, its gradient. All fp32."""
TOLD_BYTES = 8
"""Id and log-prob of one of a served teacher's likeliest tokens: `policy.distance.Told`."""
PREFILL_TOKENS = 16384
"""Prompt tokens of one prefill pass of the torch engine: `rollout.decoding.PREFILL_TOKENS`."""
SERVER_PREFILL_TOKENS = ((20 * GIB, 2048), (60 * GIB, 4096), (160 * GIB, 8192), (math.inf, 16384))
"""SGLang's `chunked_prefill_size` on GPUs with less memory than this (`arg_groups/memory_hook.py`)."""
CPU_PREFILL_TOKENS = 8192
"""The same on a CPU, where it follows the memory of a NUMA node."""
ADAPTER_VERSIONS = 2
"""Policy versions in an engine during a publish: the new one, and the one that samples until then."""
SERVER_SLOTS = ADAPTER_VERSIONS + 2
"""Adapter slots of an SGLang server, which allocates all of them at its start: two for the versions, one for
preflight's random adapter, and an empty one for the bare base."""
STREAM_BYTES = 4
"""A value of the stream that layers add to: fp32, whatever they multiply in."""
MASTER_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4
"""Per adapter parameter: fp32 master, Adam's two moments, fp32 gradient."""
ROTATION_GRAPH_BYTES = 12
"""Per element of OFT's R while a pass runs: Q and its second and third powers in fp32, for the five-term series."""
CHECKPOINT_BYTES = 12
"""Per adapter parameter in a checkpoint: fp32 master and Adam's moments."""
