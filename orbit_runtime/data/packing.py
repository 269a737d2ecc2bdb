"""Divides a step's samples into mini-batches (one optimiser update each) and micro-batches (one forward pass each).

`_D` samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from orbit_runtime.types import Sample


def split_mini_batches(samples_D: Sequence[Sample], prompts_per_batch: int | None) -> list[tuple[int, ...]]:
    """Indexes of each mini-batch: `prompts_per_batch` prompts at a time, in order of appearance; `None` for a single
    one."""
    by_prompt: dict[int, list[int]] = {}
    for index, sample in enumerate(samples_D):
        number = sample.prefix_id if sample.prompt_number is None else sample.prompt_number
        by_prompt.setdefault(number, []).append(index)
    prompts = list(by_prompt.values())
    size = prompts_per_batch or max(1, len(prompts))
    chunks = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    return [tuple(index for members in chunk for index in members) for chunk in chunks]


def pack_micro_batches(
    samples_D: Sequence[Sample], budget_T: int, indexes: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Index tuples whose cost fits `budget_T` tokens; `indexes` restricts them to one mini-batch.

    A micro-batch costs the response tokens of its samples, and each distinct prefix once. Samples that share a prefix
    stay together, longest response first; groups are ordered likewise, so that neighbours need little padding. A group
    is split only if it alone exceeds the budget; a sample above the budget goes alone. Equal input gives equal output.
    """
    groups = _group_by_prefix(samples_D, range(len(samples_D)) if indexes is None else indexes)
    for members in groups:
        members.sort(key=lambda index: -_response_length(samples_D[index]))  # stable: ties keep their order
    groups.sort(key=lambda members: -_response_length(samples_D[members[0]]))

    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    cost = 0
    for members in groups:
        group_cost = batch_cost(samples_D, members)
        if current and cost + group_cost > budget_T:
            batches.append(tuple(current))
            current, cost = [], 0
        if group_cost <= budget_T:
            current += members
            cost += group_cost
        else:
            *full, current = _cut_group(samples_D, members, budget_T)
            batches += [tuple(part) for part in full]
            cost = batch_cost(samples_D, current)
    if current:
        batches.append(tuple(current))
    return batches


def batch_cost(samples_D: Sequence[Sample], indexes: Sequence[int]) -> int:
    """Tokens that a micro-batch computes: responses, and each distinct prefix once."""
    prefixes = {samples_D[index].prefix_id: samples_D[index].prefix_length for index in indexes}
    return sum(prefixes.values()) + sum(_response_length(samples_D[index]) for index in indexes)


def _cut_group(samples_D: Sequence[Sample], members: Sequence[int], budget_T: int) -> list[list[int]]:
    """Splits the members of one group into as few runs as possible, each of which pays for the prefix again."""
    prefix_length = samples_D[members[0]].prefix_length
    parts: list[list[int]] = []
    cost = 0
    for index in members:
        length = _response_length(samples_D[index])
        if not parts or cost + length > budget_T:
            parts.append([])
            cost = prefix_length
        parts[-1].append(index)
        cost += length
    return parts


def _group_by_prefix(samples_D: Sequence[Sample], indexes: Sequence[int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for index in indexes:
        groups.setdefault(samples_D[index].prefix_id, []).append(index)
    return list(groups.values())


def _response_length(sample: Sample) -> int:
    return len(sample.token_ids_T) - sample.prefix_length
