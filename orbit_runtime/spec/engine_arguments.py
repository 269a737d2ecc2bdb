"""`rollout.engineArguments`: which of SGLang's flags a manifest may pass, and which are Orbit's own.

Belongs here: names, kinds and bounds, of SGLang 0.5.23. Does not belong here: whether they fit a model and its GPUs
(`planner.support.served`), or the flags that Orbit writes (`rollout.sglang_server`).

A flag is in the table if a publish is still proven with it and if it names no file, no code and no address.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

ATTENTION = ("triton", "flashinfer", "fa3", "fa4", "flashmla", "trtllm_mla", "trtllm_mha", "torch_native")


@dataclass(frozen=True, slots=True)
class Argument:
    """Example: `Argument(int, least=1)` takes `ep-size: 8`."""

    kind: type
    """`bool` is a flag without a value; `false` leaves it out."""
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()

    def objection(self, value: Any) -> str | None:
        """Why the value is not one of this argument, in words of what it takes; None where it is."""
        if self.kind is bool:
            return None if isinstance(value, bool) else "takes true or false"
        if self.kind is str:
            return None if value in self.choices else f"takes {', '.join(self.choices)}"
        number = int if self.kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, number):
            return "takes a whole number" if self.kind is int else "takes a number"
        if self.least <= value <= self.most:
            return None
        return f"takes {self.least:g} to {self.most:g}" if self.most < math.inf else f"takes at least {self.least:g}"


COUNT = Argument(int, least=1)
SWITCH = Argument(bool)
ALLOWED: Mapping[str, Argument] = {
    # How the model is spread over the server's GPUs.
    "ep-size": COUNT,
    "attn-dp-size": COUNT,
    "moe-dense-tp-size": Argument(int, least=1, most=1),
    "enable-dp-lm-head": SWITCH,
    "moe-a2a-backend": Argument(str, choices=("none", "deepep", "mooncake", "flashinfer")),
    "deepep-mode": Argument(str, choices=("auto", "normal", "low_latency")),
    "disable-custom-all-reduce": SWITCH,
    "enable-nccl-nvls": SWITCH,
    "enable-symm-mem": SWITCH,
    # Speculation, with what the checkpoint itself holds or with what was said before.
    "speculative-algorithm": Argument(str, choices=("NEXTN", "EAGLE", "NGRAM")),
    "speculative-num-steps": COUNT,
    "speculative-eagle-topk": COUNT,
    "speculative-num-draft-tokens": COUNT,
    # How passes are put together.
    "chunked-prefill-size": Argument(int, least=64, most=2**20),
    "max-prefill-tokens": Argument(int, least=64, most=2**20),
    "prefill-max-requests": COUNT,
    "enable-mixed-chunk": SWITCH,
    "num-continuous-decode-steps": COUNT,
    "schedule-policy": Argument(str, choices=("lpm", "random", "fcfs", "dfs-weight", "lof")),
    "schedule-conservativeness": Argument(float, least=0, most=10),
    "page-size": Argument(int, least=1, most=256),
    "disable-radix-cache": SWITCH,
    "disable-chunked-prefix-cache": SWITCH,
    "disable-overlap-schedule": SWITCH,
    # What computes.
    "attention-backend": Argument(str, choices=ATTENTION),
    "prefill-attention-backend": Argument(str, choices=ATTENTION),
    "decode-attention-backend": Argument(str, choices=ATTENTION),
    "disable-decode-cuda-graph": SWITCH,
    "disable-prefill-cuda-graph": SWITCH,
    "disable-cuda-graph-padding": SWITCH,
    "cuda-graph-max-bs-decode": COUNT,
    "cuda-graph-max-bs-prefill": COUNT,
    "watchdog-timeout": Argument(float, least=30, most=86400),
}  # fmt: skip
"""Arguments by SGLang's own name, without the dashes."""

_MODEL, _LOG = "the model is the manifest's", "Orbit keeps what a server writes"
_MEMORY = "the planner computes it"
OURS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("model-path", "model", "tokenizer-path", "load-format", "revision", "json-model-override-args", "config"),
        (_MODEL, "use `model.uri`"),
    ),
    **dict.fromkeys(("dtype", "quantization"), (_MODEL, "use `model.precision`, `model.activationPrecision`")),
    "kv-cache-dtype": ("keys and values are BF16, as the trainer computes them", "leave it out"),
    "context-length": ("it follows from the manifest", "use `model.maxSequenceLength`"),
    **dict.fromkeys(("host", "port", "nccl-port", "grpc-port"), ("Orbit chooses the address", "leave it out")),
    **dict.fromkeys(("api-key", "admin-api-key"), ("the key is the run's own token", "leave it out")),
    **dict.fromkeys(
        ("tp-size", "tensor-parallel-size", "tp"), ("it has a field of its own", "use `rollout.tensorParallel`")
    ),
    **dict.fromkeys(
        ("dp-size", "data-parallel-size", "dp"), ("replicas are servers of their own", "use `rollout.replicas`")
    ),
    "enable-dp-attention": ("SGLang 0.5.23 has another name for it", "write `attn-dp-size`"),
    **dict.fromkeys(("nnodes", "node-rank", "dist-init-addr"), ("a server stays on one machine", "leave it out")),
    **dict.fromkeys(
        ("base-gpu-id", "gpu-id-step", "device"),
        ("the plan assigns GPUs", "use `placement.trainerGpus`, `rollout.replicas`, `rollout.tensorParallel`"),
    ),
    **dict.fromkeys(
        ("mem-fraction-static", "max-total-tokens"),
        (_MEMORY, "use `rollout.maxRunningRequests`, `model.maxSequenceLength`, `rollout.sleep`"),
    ),
    "max-running-requests": ("it has a field of its own", "use `rollout.maxRunningRequests`"),
    "random-seed": ("it follows from the manifest", "use `data.seed`"),
    **dict.fromkeys(
        ("enable-lora", "lora-paths", "max-lora-rank", "max-loras-per-batch", "max-loaded-loras", "lora-backend",
         "lora-eviction-policy", "enable-lora-overlap-loading"),
        ("adapters are published and proven by Orbit", "use `adapter`"),
    ),
    "lora-target-modules": ("it follows from the manifest", "use `adapter.targets`"),
    "experts-shared-outer-loras": ("it follows from the manifest", "use `adapter.experts`"),
    **dict.fromkeys(
        ("moe-runner-backend", "disable-shared-experts-fusion"),
        ("adapters of experts reach only the kernels that Orbit chooses", "leave it out"),
    ),
    "sampling-backend": ("it follows from the manifest", "leave it out"),
    "enable-fp32-lm-head": ("logits are fp32 wherever the run computes in BF16", "leave it out"),
    "enable-deterministic-inference": ("it has a field of its own", "use `rollout.deterministic`"),
    **dict.fromkeys(
        ("enable-memory-saver", "enable-weights-cpu-backup"), ("it has a field of its own", "use `rollout.sleep`")
    ),
    **dict.fromkeys(
        ("log-level", "log-level-http", "log-requests", "log-requests-level", "log-requests-target",
         "crash-dump-folder", "export-metrics-to-file", "export-metrics-to-file-dir", "debug-tensor-dump-output-folder",
         "enable-metrics"),
        (_LOG, "leave it out"),
    ),
    "speculative-draft-model-path": (
        "a second model is neither planned nor fetched", "write `speculative-algorithm: NEXTN` or `NGRAM`",
    ),
    **dict.fromkeys(
        ("trust-remote-code", "custom-weight-loader", "forward-hooks", "tool-server"),
        ("a model's code is never run", "leave it out"),
    ),
}  # fmt: skip
"""Name → why the manifest may not pass it, and what to write instead."""


def argument_problems(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name, what is wrong, fix) of every argument that may not be passed so."""
    for name, value in arguments.items():
        plain = name.strip().lstrip("-").replace("_", "-").lower()
        if plain in OURS:
            why, fix = OURS[plain]
            yield name, f"`{name}` is set by Orbit: {why}", fix
        elif name in ALLOWED:
            objection = ALLOWED[name].objection(value)
            if objection:
                yield name, f"`{name}: {value}`: this argument {objection}", "correct the value, or leave it out"
        elif plain in ALLOWED:
            yield name, f"`{name}` is not how this argument is written", f"write `{plain}`"
        else:
            near = get_close_matches(plain, ALLOWED, 1)
            fix = f"write `{near[0]}`" if near else f"the arguments that Orbit passes on: {', '.join(sorted(ALLOWED))}"
            yield name, f"`{name}` is not an argument that Orbit passes on to SGLang", fix


def argument_flags(arguments: Mapping[str, Any]) -> list[str]:
    """The arguments for SGLang's command line. Example: `{"ep-size": 8, "enable-mixed-chunk": True}`."""
    flags: list[str] = []
    for name, value in arguments.items():
        if value is True:
            flags.append(f"--{name}")
        elif value is not False:
            flags += [f"--{name}", str(value)]
    return flags
