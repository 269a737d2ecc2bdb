"""Whole groups of rollouts for a page: every answer to a prompt with its reward, parts and advantage.

Belongs here: groups of one step as JSON values, up to a size, and which steps go into a page that must stay small.
Does not belong here: reading records (`samples`), showing (`templates/rollouts.js`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orbit_runtime.observability.run_folder import Source
from orbit_runtime.observability.samples import File, Ranged, Sample, read_samples, shorten
from orbit_runtime.storage.store import NotFound

EMBEDDED_STEPS = 12
EMBEDDED_BYTES = 1_500_000
"""Of JSON in a page, over all its steps."""
NEWEST_BYTES = 300_000
"""Of a page that asks for more."""
READ_BYTES = 1 << 25
"""Of one step's records for a page; a group that begins within is read to its end."""
HEAD, TAIL = 700, 500
"""Characters of a longer prompt or completion."""


@dataclass(frozen=True, slots=True)
class GroupPage:
    """Groups of one step, from one on."""

    step: int
    groups: tuple[Mapping[str, Any], ...]
    following: int | None
    """Where the next page begins; None: these are the last."""

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "groups": list(self.groups), "next": self.following}


def read_groups(
    source: Ranged, file: File, references: Mapping[str, str], *, start: int = 0, most_bytes: int = EMBEDDED_BYTES
) -> GroupPage:
    """Whole groups from number `start` on, at least one where there is one, as many as fit."""
    groups: list[Mapping[str, Any]] = []
    size = number = 0
    for group, read in _grouped(source, file.key):
        if number < start:
            number += 1
            continue
        content = _content(group, references)
        size += len(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode())
        if groups and (size > most_bytes or (start == 0 and read > READ_BYTES)):
            return GroupPage(file.step, tuple(groups), number)
        groups.append(content)
        number += 1
    return GroupPage(file.step, tuple(groups), None)


def spread(files: Sequence[File], count: int = EMBEDDED_STEPS) -> list[File]:
    """The first, the last, and others evenly between them."""
    if len(files) <= count:
        return list(files)
    return [files[round(index * (len(files) - 1) / (count - 1))] for index in range(count)]


def _grouped(source: Ranged, key: str) -> Iterator[tuple[list[Sample], int]]:
    """Each group's samples, with the bytes that were read by its end: records of one prompt that follow each other."""
    held: list[Sample] = []
    read = 0
    for sample, at in read_samples(source, key):
        if held and (sample.prompt_id != held[-1].prompt_id or sample.sample_index <= held[-1].sample_index):
            yield held, read
            held = []
        held.append(_clipped(sample))
        read = at
    if held:
        yield held, read


def _clipped(sample: Sample) -> Sample:
    return replace(sample, prompt=shorten(sample.prompt, HEAD, TAIL), completion=shorten(sample.completion, HEAD, TAIL))


def _content(group: Sequence[Sample], references: Mapping[str, str]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for sample in group for name in sample.parts))
    return {
        "id": group[0].prompt_id,
        "prompt": group[0].prompt,
        "expected": shorten(references.get(group[0].prompt_id, ""), HEAD, TAIL),
        "parts": names,
        "rows": [
            [
                sample.sample_index,
                sample.completion,
                _short(sample.reward),
                _short(sample.advantage),
                sample.tokens,
                sample.outcome,
                sample.finish_reason,
                [_short(sample.parts.get(name)) for name in names],
            ]
            for sample in group
        ],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def read_references(source: Source, file: File) -> dict[str, str]:
    """What a step's prompts expect, by prompt."""
    try:
        found = json.loads(source.get(f"{file.key.removesuffix('.jsonl.zst')}.references.json"))
    except (NotFound, ValueError):
        return {}
    return {str(prompt): str(answer) for prompt, answer in found.items()} if isinstance(found, dict) else {}
