"""Turns scored rollouts or demonstrations into training samples."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from orbit_runtime.data.demonstrations import EncodedDemonstration
from orbit_runtime.types import FLOATS, ColumnName, Group, Rollout, Sample

_ZERO = array(FLOATS, [0.0])


def split_cohorts(group: Group) -> list[Group]:
    """The group's rollouts of each cohort, in order of appearance; the group itself if there is only one."""
    names = dict.fromkeys(rollout.cohort for rollout in group.rollouts_G)
    if len(names) < 2:
        return [group]
    return [Group(group.prompt, tuple(each for each in group.rollouts_G if each.cohort == name)) for name in names]


def build_samples(groups: Sequence[Group]) -> list[Sample]:
    """One sample per rollout that trains (`Rollout.trains`), in the order given, with the column `sampled`.

    Timeouts and crashes (reward `None`) become no sample: they count in no mean and in no length (see
    `algorithms.losses`). Rollouts of one group that start with the same unmasked tokens share a `prefix_id`; ids
    count from 0 over the batch.
    """
    samples: list[Sample] = []
    next_id, number, before = 0, -1, None
    for group in groups:
        # The cohorts of a prompt follow each other, and hold the same record of it.
        number += group.prompt is not before
        before = group.prompt
        prefixes: dict[bytes, int] = {}
        for rollout in group.rollouts_G:
            if not rollout.trains:
                continue
            length = rollout.loss_mask_T.index(1)
            prefix = rollout.token_ids_T[:length].tobytes()
            if prefix not in prefixes:
                prefixes[prefix] = next_id
                next_id += 1
            samples.append(_build_sample(rollout, prefixes[prefix], length, number))
    return samples


def _build_sample(rollout: Rollout, prefix_id: int, prefix_length: int, number: int) -> Sample:
    return Sample(
        token_ids_T=rollout.token_ids_T,
        loss_mask_T=rollout.loss_mask_T,
        columns={"sampled": rollout.logprobs_T},
        prefix_id=prefix_id,
        prefix_length=prefix_length,
        routed_experts=rollout.routed_experts,
        prompt_number=number,
        teacher_top=rollout.teacher_top,
    )


def build_demonstration_samples(encoded: Sequence[EncodedDemonstration]) -> list[Sample]:
    """One sample for each demonstration, with its own prefix. Every learned token has the same weight."""
    return [
        Sample(
            each.token_ids_T,
            each.loss_mask_T,
            {"advantage": spread(1.0, each.loss_mask_T)},
            number,
            each.loss_mask_T.index(1),
        )
        for number, each in enumerate(encoded)
    ]


def with_column(samples_D: Sequence[Sample], name: ColumnName, columns_D: Sequence[array[float]]) -> list[Sample]:
    """The samples with an additional column; an array is used without a copy."""
    return [
        replace(sample, columns={**sample.columns, name: column})
        for sample, column in zip(samples_D, columns_D, strict=True)
    ]


def with_end(sample: Sample) -> Sample:
    """The sample with one more token, to evaluate the state after the last one; which token it is does not matter."""
    last = sample.token_ids_T[-1:]
    columns = {name: column + array(FLOATS, [0.0]) for name, column in sample.columns.items()}
    mask_T = sample.loss_mask_T + array(sample.loss_mask_T.typecode, [1])
    return replace(
        sample, token_ids_T=sample.token_ids_T + last, loss_mask_T=mask_T, columns=columns, routed_experts=None,
        teacher_top=None,
    )  # fmt: skip


def shortened(sample: Sample, tokens: int) -> Sample:
    """The sample with at most so many tokens behind its prefix."""
    end = sample.prefix_length + tokens
    if end >= len(sample.token_ids_T):
        return sample
    columns = {name: column[:end] for name, column in sample.columns.items()}
    return replace(
        sample, token_ids_T=sample.token_ids_T[:end], loss_mask_T=sample.loss_mask_T[:end], columns=columns,
        routed_experts=None, teacher_top=None,
    )  # fmt: skip


def spread(value: float | Sequence[float], mask_T: array[int]) -> array[float]:
    """A column over the tokens that train: one value for all, or each its own from `value`."""
    flags = mask_T.tobytes()
    kept = flags.strip(b"\0")
    if isinstance(value, float) and b"\0" not in kept:
        # The tokens of a single turn are one run.
        column = array(FLOATS, [value]) * len(kept)
        if len(kept) < len(flags):
            first = len(flags) - len(flags.lstrip(b"\0"))
            column = _ZERO * first + column + _ZERO * (len(flags) - first - len(kept))
        return column
    column_T = np.zeros(len(mask_T), np.float32)
    column_T[np.flatnonzero(mask_T)] = value
    return array(FLOATS, column_T.tobytes())


def count_trained(mask_T: array[int]) -> int:
    """Number of tokens that train."""
    return mask_T.tobytes().count(1)


def trained(column_T: array[float], mask_T: array[int]) -> array[float]:
    """The column's values for the tokens that train."""
    assert len(column_T) == len(mask_T)
    return array(FLOATS, compress(column_T, mask_T))
