"""Whole groups of rollouts for a page: every completion of a prompt with its reward, parts and advantage."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orbit_runtime.observability.run_folder import FolderSource
from orbit_runtime.observability.samples import File, Ranged, ShownSample, read_samples, shorten
from orbit_runtime.storage.store import NotFound

EMBEDDED_STEPS = 12
EMBEDDED_BYTES = 1_500_000
"""Bytes of JSON in a page, over all its steps."""
NEWEST_BYTES = 300_000
"""Bytes in a page that can request more."""
READ_BYTES = 1 << 25
"""Bytes read of one step's records for a page; a group that begins within them is read to its end."""
HEAD, TAIL = 700, 500
"""Characters kept from the start and the end of a longer prompt or completion."""


@dataclass(frozen=True, slots=True)
class GroupPage:
    """Consecutive groups of one step."""

    step: int
    groups: tuple[Mapping[str, Any], ...]
    following: int | None
    """Number of the next page's first group; None if these are the last."""

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "groups": list(self.groups), "next": self.following}


def read_groups(
    source: Ranged, file: File, references: Mapping[str, str], *, start: int = 0, most_bytes: int = EMBEDDED_BYTES
) -> GroupPage:
    """As many whole groups from number `start` on as fit in `most_bytes`, and at least one."""
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
    """The first and the last step, and others evenly spaced between them."""
    if len(files) <= count:
        return list(files)
    return [files[round(index * (len(files) - 1) / (count - 1))] for index in range(count)]


def _grouped(source: Ranged, key: str) -> Iterator[tuple[list[ShownSample], int]]:
    """Yields each group's samples (consecutive records of one prompt), and the bytes read by its end."""
    held: list[ShownSample] = []
    read = 0
    for sample, at in read_samples(source, key):
        if held and (sample.prompt_id != held[-1].prompt_id or sample.sample_index <= held[-1].sample_index):
            yield held, read
            held = []
        prompt, completion = (shorten(each, HEAD, TAIL) for each in (sample.prompt, sample.completion))
        held.append(replace(sample, prompt=prompt, completion=completion))
        read = at
    if held:
        yield held, read


def _content(group: Sequence[ShownSample], references: Mapping[str, str]) -> dict[str, Any]:
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
                *([sample.token_values] if sample.token_values else []),
            ]
            for sample in group
        ],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def read_references(source: FolderSource, file: File) -> dict[str, str]:
    """Expected answers of a step's prompts, by prompt."""
    try:
        found = json.loads(source.get(f"{file.key.removesuffix('.jsonl.zst')}.references.json"))
    except (NotFound, ValueError):
        return {}
    return {str(prompt): str(answer) for prompt, answer in found.items()} if isinstance(found, dict) else {}
