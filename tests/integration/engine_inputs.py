"""What engines are asked in tests: requests, and adapters that nobody trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from orbit_runtime.adapters.files import files_digest
from orbit_runtime.adapters.state import export_adapter
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.policy import Policy
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import AdapterFiles, Completion, Request, Sampling


def requests_for(
    tokenizer: ChatTokenizer, prompts: Sequence[str], samples: int, *, sampling: Sampling, adapter: str | None = None
) -> list[Request]:
    made = []
    for prompt in prompts:
        ids = tuple(tokenizer.encode_chat([{"role": "user", "content": prompt}]))
        for sample in range(samples):
            key = stream_key(0, "sample", prompt, 0, sample, 0)
            made.append(Request(len(made), key, ids, sampling, adapter))
    return made


def by_id(completions: Sequence[Completion]) -> dict[int, Completion]:
    return {completion.request_id: completion for completion in completions}


def random_adapter(policy: Policy, version: int, scale: float = 0.05) -> AdapterFiles:
    """The policy's adapter with masters drawn anew; the masters are restored afterwards."""
    masters = policy.injected.masters.parameters
    before = {name: parameter.detach().clone() for name, parameter in masters.items()}
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in masters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    files = export_adapter(policy.injected, policy.injected.config, "base")
    with torch.no_grad():
        for name, parameter in masters.items():
            parameter.copy_(before[name])
    return AdapterFiles(version, files, files_digest(files))
