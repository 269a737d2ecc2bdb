"""From scored rollouts to what trains.

Belongs here: which rollouts become samples, and what they share. Does not belong here: advantages, tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from orbit_runtime.types import Group, Rollout, Sample


def build_samples(groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> list[Sample]:
    """One sample per rollout that was scored, in the order given; `advantages[i]` holds the advantages_G of
    `groups[i]`.

    Timeouts and crashes (reward `None`) become no sample: they count in no mean and in no length (see
    `algorithms.reduction`). A rollout in which the policy chose no token cannot train and is left out as well.
    Rollouts of one group that start with the same unmasked tokens share a `prefix_id`; ids count from 0 over the
    batch.
    """
    samples: list[Sample] = []
    next_id = 0
    for group, advantages_G in zip(groups, advantages, strict=True):
        prefixes: dict[tuple[int, ...], int] = {}
        for rollout, advantage in zip(group.rollouts_G, advantages_G, strict=True):
            if rollout.reward is None or 1 not in rollout.loss_mask_T:
                continue
            prefix = rollout.token_ids_T[: rollout.loss_mask_T.index(1)]
            if prefix not in prefixes:
                prefixes[prefix] = next_id
                next_id += 1
            samples.append(_build_sample(rollout, advantage, prefixes[prefix], len(prefix)))
    return samples


def _build_sample(rollout: Rollout, advantage: float, prefix_id: int, prefix_length: int) -> Sample:
    return Sample(
        token_ids_T=rollout.token_ids_T,
        loss_mask_T=rollout.loss_mask_T,
        logprobs_T=rollout.logprobs_T,
        advantage=advantage,
        prefix_id=prefix_id,
        prefix_length=prefix_length,
        routed_experts=rollout.routed_experts,
    )
