"""Asking the plug-in in an SGLang server about a pass, for a snapshot or for the facts of its slots: two files each.

Belongs here: the request, and reading the answer. Does not belong here: what is recorded (`sglang_plugin.taps`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from orbit_runtime.adapters import tensorfile
from orbit_runtime.model_info.headers import parse_header
from orbit_runtime.policy.snapshot import Snapshot

REQUEST, ANSWER = "request.json", "answer.safetensors"
FACTS_REQUEST, FACTS = "facts-request.json", "facts.json"
FACTS_SECONDS = 60.0
"""Longest that digesting what a slot holds may take."""
LOOK_SECONDS = 0.001


def write_request(folder: Path, token_ids_T: Sequence[int], adapter: str | None, values: Sequence[str]) -> None:
    """Of the next pass over exactly these tokens. `values`: tensors to hand over whole."""
    _write(folder / REQUEST, {"token_ids": list(token_ids_T), "adapter": adapter, "values": list(values)})


@contextmanager
def asked_facts(folder: Path, adapters: Sequence[str]) -> Iterator[Callable[[], Awaitable[Mapping[str, Any] | None]]]:
    """Of the passes in this block that hold all these adapters. What it gives waits for what is told of the newest.

    None: there was no such pass, or nothing came in time.
    """
    name = secrets.token_hex(8)
    _write(folder / FACTS_REQUEST, {"name": name, "adapters": list(adapters)})

    async def told() -> Mapping[str, Any] | None:
        until = time.monotonic() + FACTS_SECONDS
        while time.monotonic() < until:
            try:
                found: Mapping[str, Any] = json.loads((folder / FACTS).read_bytes())
            except FileNotFoundError:
                return None
            if found["request"] != name:
                return None
            if "facts" in found:
                return cast("Mapping[str, Any]", found["facts"])
            await asyncio.sleep(LOOK_SECONDS)
        return None

    try:
        yield told
    finally:
        for file in (FACTS_REQUEST, FACTS):
            (folder / file).unlink(missing_ok=True)


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


def _write(file: Path, content: Mapping[str, Any]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.rename(file)
