"""Asks the plug-in in an SGLang server about a pass, for a snapshot or for the facts of its slots, through two files.

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

import torch
from torch import Tensor

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.files import seconds_for
from orbit_runtime.errors import GateError
from orbit_runtime.model_info.headers import parse_header
from orbit_runtime.policy.snapshot import Snapshot, SnapshotPart
from orbit_runtime.workers.servers.protocol import (
    ANSWER,
    FACTS,
    FACTS_REQUEST,
    LOOK_SECONDS,
    REQUEST,
    SEEN,
    announce,
    write_whole,
)

SEEN_SECONDS = 20.0
"""The server's response comes from its first process; the others may be a little behind."""
ANSWER_SECONDS = 900.0
"""Limit for a process to hash its shard of a base: 100 GB at 0.2 GB/s would take 500 s."""
FACTS_SECONDS = 60.0
"""Limit for hashing what slots hold, in addition to the time that their size takes."""


def _ask(folder: Path, name: str, request: Mapping[str, Any]) -> None:
    write_whole(folder / name, json.dumps(request).encode())
    announce(folder)


@contextmanager
def asked_facts(
    folder: Path, token_ids_T: Sequence[int], adapters: Sequence[str], standing: Sequence[str] = (), num_bytes: int = 0
) -> Iterator[Callable[[], Awaitable[Mapping[str, Any] | None]]]:
    """Requests facts of the first pass in this block that reads these tokens under all these adapters.

    The yielded function waits for the facts; it returns None if there was no such pass, or nothing came in time.

    Args:
        standing: adapters to report as well, which need not be in the pass.
        num_bytes: size of all these adapters.
    """
    name, seconds = secrets.token_hex(8), FACTS_SECONDS + seconds_for(num_bytes)
    asked = {
        "name": name, "token_ids": list(token_ids_T), "adapters": list(adapters), "standing": list(standing),
        # A server process waits half as long for the other ones as this side waits for it.
        "seconds": seconds / 2,
    }  # fmt: skip
    answer = folder / FACTS.format(name=name)
    _ask(folder, FACTS_REQUEST, asked)

    async def told() -> Mapping[str, Any] | None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                found: Mapping[str, Any] = json.loads(answer.read_bytes())
            except FileNotFoundError:
                return None
            if "facts" in found:
                return cast("Mapping[str, Any]", found["facts"])
            await asyncio.sleep(LOOK_SECONDS)
        return None

    try:
        yield told
    finally:
        _remove(folder / FACTS_REQUEST, answer)
        announce(folder)


@contextmanager
def asked_pass(
    folder: Path, token_ids_T: Sequence[int], adapter: str | None, values: Sequence[str], ranks: int
) -> Iterator[Callable[[], list[bytes]]]:
    """Requests the results of the next pass over exactly these tokens, within this block.

    The yielded function waits for every rank's answer.

    Args:
        values: tensors to hand over whole.
    """
    seen, answers = ([folder / name.format(rank=rank) for rank in range(ranks)] for name in (SEEN, ANSWER))
    _remove(*seen, *answers)
    _ask(folder, REQUEST, {"token_ids": list(token_ids_T), "adapter": adapter, "values": list(values)})

    def told() -> list[bytes]:
        # Rank 0's file exists before the server responds, or never.
        if seen[0].exists():
            _wait_for(seen, SEEN_SECONDS)
            _wait_for(answers, ANSWER_SECONDS)
        return [each.read_bytes() for each in answers]

    try:
        yield told
    finally:
        _remove(folder / REQUEST, *seen, *answers)
        announce(folder)


def _wait_for(files: Sequence[Path], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not all(each.exists() for each in files) and time.monotonic() < until:
        time.sleep(0.01)


def _remove(*files: Path) -> None:
    for each in files:
        each.unlink(missing_ok=True)


def build_snapshot(answers: Sequence[bytes], rows: int, values: Callable[[Sequence[str]], Sequence[bytes]]) -> Snapshot:
    """
    Args:
        answers: answers of all ranks, in order, each with its shard of the results.
        rows: number of tokens of the sequence that both sides compute.
        values: asks again, for these tensors.

    Raises:
        GateError: a process could not report what it computed.
    """
    facts = [_facts(answer) for answer in answers]
    for rank, fact in enumerate(facts):
        if "error" in fact:
            raise GateError(f"the plug-in cannot tell rank {rank}'s pass: {fact['error']}", where="rollout")
    told = [(_parts(answer), json.loads(fact["shares"])) for answer, fact in zip(answers, facts, strict=True)]
    points = {}
    for name in json.loads(facts[0]["order"]):
        parts = {shares[name][1]: held["point"][name] for held, shares in told if name in held["point"]}
        ordered = [parts[place][:rows] for place in sorted(parts)]
        points[name] = torch.cat(ordered, -1) if told[0][1][name][0] == "part" else _sum(ordered)

    def ask(names: Sequence[str]) -> dict[str, tuple[Tensor, ...]]:
        found = [_parts(answer)["value"] for answer in values(names)]
        return {name: tuple(held[name] for held in found if name in held) for name in names}

    return Snapshot(points, _held(facts), told[0][0]["constant"], ask, tuple(json.loads(facts[0]["absent"])))


def _held(facts: Sequence[Mapping[str, str]]) -> dict[str, tuple[SnapshotPart, ...]]:
    held: dict[str, tuple[SnapshotPart, ...]] = {}
    for rank, fact in enumerate(facts):
        for name, (digest, shape, axis, start) in json.loads(fact["parts"]).items():
            held[name] = (*held.get(name, ()), SnapshotPart(digest, tuple(shape), axis, start, rank))
    return held


def _sum(summands: Sequence[Tensor]) -> Tensor:
    """Sums a result of which each rank has a partial sum; if all ranks hold the same, it was already summed."""
    first, *others = summands
    return first if all(torch.equal(first, each) for each in others) else torch.stack(list(summands)).sum(0)


def _facts(answer: bytes) -> Mapping[str, str]:
    return parse_header(answer, size=len(answer), where=REQUEST).metadata


def _parts(answer: bytes) -> Mapping[str, Mapping[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {"point": {}, "constant": {}, "value": {}}
    for key, tensor in tensorfile.parse(answer, where=REQUEST).items():
        kind, _, name = key.partition(":")
        parts[kind][name] = tensor
    return parts
