"""Builds a step's metrics row from the results of its stages, and checks the parity of its rollouts.

Belongs here: collecting numbers under their names. Does not belong here: their meaning (`observability.metrics`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orbit_runtime.data.samples import count_trained
from orbit_runtime.data.stream import PromptStream
from orbit_runtime.environments.episodes import UNCHOSEN
from orbit_runtime.errors import GateError
from orbit_runtime.loop.collect import CollectedStep, Staleness, count_groups
from orbit_runtime.loop.state import RunState
from orbit_runtime.observability.metrics import FIELDS, MetricsRow, build_row, part_field, source_field
from orbit_runtime.parity.statistics import ParityLimits
from orbit_runtime.types import Group, Rollout, UpdateResult


def step_row(
    state: RunState,
    collected: CollectedStep,
    known: Mapping[str, float | None],
    result: UpdateResult,
    staleness: Staleness,
    *,
    seconds_train: float,
    seconds_publish: float,
    seconds_total: float,
) -> MetricsRow:
    """The row before the step's checkpoint: `seconds_checkpoint` is unknown, and not part of the total."""
    assert state.publication is not None
    rollouts = [rollout for group in collected.groups_P for rollout in group.rollouts_G]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    outcomes = Counter(rollout.outcome for rollout in rollouts)
    lengths = [count_trained(rollout.loss_mask_T) for rollout in rollouts]
    tokens = sum(lengths)
    counts = count_groups(collected.groups_P)
    trained = {name: value for name, value in result.metrics.items() if name in FIELDS}
    return build_row(
        **trained,
        step=state.step,
        policy_version=state.version,
        adapter_digest=state.publication.adapter.digest,
        reward_mean=statistics.fmean(rewards) if rewards else None,
        reward_std=statistics.pstdev(rewards) if rewards else None,
        reward_value=outcomes["value"],
        reward_wrong=outcomes["wrong"],
        reward_timeout=outcomes["timeout"],
        reward_crash=outcomes["crash"],
        groups=counts.groups,
        groups_equal=counts.equal,
        groups_masked=counts.masked,
        response_tokens_mean=tokens / max(1, len(rollouts)),
        truncated_fraction=sum(rollout.finish_reason == "length" for rollout in rollouts) / max(1, len(rollouts)),
        turns_mean=_mean(sum(turn.role == "assistant" for turn in rollout.turns) for rollout in rollouts),
        tool_calls=round(sum(rollout.counts.get("tool_calls", 0) for rollout in rollouts)),
        tool_errors=round(sum(rollout.counts.get("tool_errors", 0) for rollout in rollouts)),
        tokens=tokens,
        tokens_per_second=tokens / seconds_total if seconds_total > 0 else None,
        parity_limit=state.parity_limit,
        parity_top1=min((each.top1 for each in state.publication.proofs if each.top1 is not None), default=None),
        staleness_mean=staleness.mean,
        staleness_max=staleness.max,
        rollouts_waiting=collected.waiting,
        rollouts_unfinished=collected.unfinished,
        prompts_cancelled=collected.prompts_cancelled,
        tokens_cancelled=collected.tokens_cancelled,
        tokens_unchosen=round(sum(rollout.counts.get(UNCHOSEN, 0) for rollout in rollouts)),
        seconds_collect=collected.seconds_collect,
        seconds_score=collected.seconds_score,
        seconds_train=seconds_train,
        seconds_publish=seconds_publish,
        seconds_total=seconds_total,
        **known,
        **reward_parts(rollouts),
    )


def prompt_numbers(
    prompts: PromptStream, cursor: Mapping[str, Any], groups_P: Sequence[Group]
) -> dict[str, float | None]:
    """Pass rates and statistics by source. `cursor`: position after the prompts of the step."""
    return {**pass_rates(prompts), **by_source(prompts.epochs(cursor), groups_P)}


def pass_rates(prompts: PromptStream) -> dict[str, float]:
    """Counts of a run that keeps pass rates; empty for others."""
    if prompts.rates is None:
        return {}
    tried, too_hard, too_easy = prompts.rates.counts()
    return {"prompts_tried": tried, "prompts_too_hard": too_hard, "prompts_too_easy": too_easy}


def by_source(epochs_of: Mapping[str, float], groups_P: Sequence[Group]) -> dict[str, float | None]:
    """Field → each source's mean reward, groups and epochs in the step; empty unless sources have weights."""
    found: dict[str, float | None] = {}
    for name, epochs in epochs_of.items():
        own_P = [group for group in groups_P if group.prompt.prompt_id.rpartition("/")[0] == name]
        rewards = [each.reward for group in own_P for each in group.rollouts_G]
        found |= {
            source_field(name, "reward"): _mean(reward for reward in rewards if reward is not None),
            source_field(name, "groups"): len(own_P),
            source_field(name, "epochs"): epochs,
        }
    return found


def _mean(numbers: Iterable[float]) -> float | None:
    values = list(numbers)
    return statistics.fmean(values) if values else None


def reward_parts(rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    """Field → mean of each reward over the scored rollouts; weighted, these add up to `reward_mean`. Empty for a single
    reward, whose mean is `reward_mean` up to its weight."""
    names = list(rollouts[0].reward_parts) if rollouts else []
    if len(names) < 2:
        return {}
    scored = [rollout.reward_parts for rollout in rollouts if rollout.reward is not None]
    # A scored rollout without a value for a part had no answer there, which counts as 0 in the sum as well.
    return {
        part_field(name): statistics.fmean(parts[name] or 0.0 for parts in scored) if scored else None for name in names
    }


def with_checkpoint(row: MetricsRow, seconds: float) -> MetricsRow:
    """The row with `seconds` more spent on making its step durable."""
    total = (row.number("seconds_total") or 0.0) + seconds
    tokens = row.number("tokens") or 0.0
    kept = (row.number("seconds_checkpoint") or 0.0) + seconds
    speed = tokens / total if total > 0 else None
    return build_row(**{**row, "seconds_checkpoint": kept, "seconds_total": total, "tokens_per_second": speed})


def check_parity(result: UpdateResult, limits: ParityLimits, *, enforce: bool) -> None:
    """Raises GateError (84) if engine and trainer differ on this step's rollouts by more than the limits."""
    if "parity_mean" not in result.metrics or not enforce:
        return
    found = {name: result.metrics[f"parity_{name}"] for name in ("mean", "p99", "k3", "outside", "tokens")}
    failures = "; ".join(limits.failures(**found))
    if failures:
        raise GateError(
            f"trainer and engine differ on this step's rollouts: {failures}",
            where="parity",
            fix="see parity/ in the run folder; spec.parity.preflight: Report measures without stopping",
        )
