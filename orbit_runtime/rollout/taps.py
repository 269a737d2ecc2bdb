"""Asking Orbit's plug-in in an SGLang server for a snapshot: the two files of that exchange.

Belongs here: the request, and reading the answer. Does not belong here: what is recorded (`sglang_plugin.taps`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from orbit_runtime.adapters import tensorfile
from orbit_runtime.model_info.headers import parse_header
from orbit_runtime.policy.snapshot import Snapshot

REQUEST, ANSWER = "request.json", "answer.safetensors"


def write_request(folder: Path, token_ids_T: Sequence[int], adapter: str | None, values: Sequence[str]) -> None:
    """Of the next pass over exactly these tokens. `values`: tensors to hand over whole."""
    part = folder / "request.part"
    part.write_text(json.dumps({"token_ids": list(token_ids_T), "adapter": adapter, "values": list(values)}))
    part.rename(folder / REQUEST)


def build_snapshot(answer: bytes, rows: int, values: Callable[[Sequence[str]], bytes]) -> Snapshot:
    """Args: rows: tokens of the sequence that both sides compute. values: asks again, for these tensors."""
    found = _parts(answer)
    facts = parse_header(answer, size=len(answer), where=ANSWER).metadata
    points = {name: found["point"][name][:rows] for name in json.loads(facts["order"])}
    return Snapshot(
        points,
        json.loads(facts["digests"]),
        found["constant"],
        lambda names: _parts(values(names))["value"],
    )


def _parts(answer: bytes) -> Mapping[str, Mapping[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {"point": {}, "constant": {}, "value": {}}
    for key, tensor in tensorfile.parse(answer, where=ANSWER).items():
        kind, _, name = key.partition(":")
        parts[kind][name] = tensor
    return parts
