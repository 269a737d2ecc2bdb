"""The charts of a page: for a run, for its evaluations, and for several runs overlaid.

Belongs here: titles, order, and which numbers go into which chart. Does not belong here: drawing
(`plots`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from orbit_runtime.observability import plots
from orbit_runtime.observability.metrics import STAGES, MetricsRow
from orbit_runtime.observability.plots import Series

COLOURS = 8
LIMIT = 9
"""The style of a limit's line."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing with its title and the lines named in its legend."""

    title: str
    svg: str
    legend: Sequence[Series]
    is_main: bool = True
    """Whether it is shown without expanding the page."""


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """One chart of a run, by the fields of its rows."""

    title: str
    lines: tuple[tuple[str, str], ...]
    """Field and its name in the legend; `parity_limit` is drawn as a limit."""
    log: bool = False
    most: float | None = None
    is_main: bool = False
    deviation: str | None = None
    """Name of the field with the standard deviation around the first line."""
    varies: bool = False
    """Whether to omit the chart if no line ever changes, as for features that the run does not use."""


HELD_OUT_LOSS = "Held-out loss (nats per token)"

PLANS: tuple[ChartPlan, ...] = (
    ChartPlan("Reward", (("reward_mean", "mean ± standard deviation"),), is_main=True, deviation="reward_std"),
    ChartPlan("Train-rollout parity |Δ log-prob|",
         (("parity_mean", "mean"), ("parity_max", "max"), ("parity_limit", "limit of the mean")), log=True,
         is_main=True),
    ChartPlan("Response length (tokens)", (("response_tokens_mean", "mean"),), is_main=True),
    ChartPlan("Loss", (("loss", "loss"),)),
    ChartPlan("KL from the base (nats per token)", (("kl_base", "of a few samples"), ("kl", "KL term"))),
    ChartPlan("Entropy (nats)", (("entropy", "entropy"),)),
    ChartPlan("Gradient norm before clipping", (("grad_norm", "norm"),)),
    ChartPlan("Learning rate", (("learning_rate", "rate"),), varies=True),
    ChartPlan("Clipped tokens (share)", (("clip_fraction", "share"),), most=1.0, varies=True),
    ChartPlan("Tokens of weight 0 (share)", (("dropped_fraction", "share"),), most=1.0, varies=True),
    ChartPlan("Completions cut off (share)", (("truncated_fraction", "share"),), most=1.0, varies=True),
    ChartPlan("Divergence from the teacher (nats)", (("teacher_divergence", "divergence"),)),
    ChartPlan("Critic's loss", (("value_loss", "loss"),)),
    ChartPlan("Variance predicted by the critic (share)", (("explained_variance", "share"),), most=1.0),
    ChartPlan("Turns per episode", (("turns_mean", "mean"),), varies=True),
    ChartPlan("Tool calls", (("tool_calls", "calls"), ("tool_errors", "errors")), varies=True),
    ChartPlan("Policy versions behind", (("staleness_mean", "mean"), ("staleness_max", "max")), varies=True),
    ChartPlan("Cancelled stragglers", (("prompts_cancelled", "prompts"),), varies=True),
    ChartPlan("Discarded tokens of stragglers", (("tokens_cancelled", "tokens"),), varies=True),
    ChartPlan("Tokens of branches that were not chosen", (("tokens_unchosen", "tokens"),), varies=True),
    ChartPlan("Top-1 agreement on the canary", (("parity_top1", "share"),), most=1.0),
    ChartPlan("Parity with and without router replay",
         (("parity_mean_replayed", "through rollout's experts"),
          ("parity_mean_unreplayed", "through the trainer's own")), log=True),
    ChartPlan("Agreement of the routers (share)", (("router_agreement", "share"),), most=1.0),
    ChartPlan("Tokens per second", (("tokens_per_second", "whole step"),)),
)  # fmt: skip
SECONDS = "Seconds of a step, by stage"


def build_charts(rows: Sequence[MetricsRow]) -> list[Chart]:
    """The charts for which the run has numbers."""
    steps = steps_of(rows)
    charts = [_draw(plan, steps, rows) for plan in plans_of(rows)]
    stages = [Series(stage, [row.number(f"seconds_{stage}") for row in rows], at) for at, stage in enumerate(STAGES)]
    stages = [each for each in stages if any(each.values)]
    charts.append(Chart(SECONDS, plots.draw_stack(SECONDS, steps, stages), stages, is_main=False))
    return [chart for chart in charts if chart.svg]


def plans_of(rows: Sequence[MetricsRow]) -> list[ChartPlan]:
    """Charts of the fields for which these rows have numbers: several rewards follow the total reward; if nothing is
    scored, the loss is among the first."""
    found = []
    has_reward = any(row.number("reward_mean") is not None for row in rows)
    for plan in PLANS:
        values = [
            line for field, _ in plan.lines if (line := [x for row in rows if (x := row.number(field)) is not None])
        ]
        if not values or (plan.varies and all(len(set(line)) <= 1 for line in values)):
            continue
        if not has_reward:
            plan = replace(plan, is_main=plan.title == "Loss")
        found.append(plan)
        if plan.title == "Reward":
            found += [
                ChartPlan(f"Reward {name}, before its weight", ((f"reward_part_{name}_mean", "mean"),), is_main=True)
                for name in dict.fromkeys(name for row in rows for name in row.reward_parts)
            ]
    return found


def steps_of(rows: Sequence[MetricsRow]) -> list[int]:
    return [int(row.number("step") or 0) for row in rows]


def _draw(plan: ChartPlan, steps: Sequence[int], rows: Sequence[MetricsRow]) -> Chart:
    series = [
        Series(label, [row.number(field) for row in rows], LIMIT if field == "parity_limit" else style)
        for style, (field, label) in enumerate(plan.lines)
        if any(row.number(field) is not None for row in rows)
    ]
    if plan.deviation:
        spread = [row.number(plan.deviation) for row in rows]
        ends = [_moved(series[0].values, spread, sign) for sign in (-1, 1)]
        if _are_shares(series[0].values, spread):
            ends = [[each and min(1.0, max(0.0, each)) for each in end] for end in ends]
        series[0] = replace(series[0], band=(ends[0], ends[1]))
    svg = plots.draw_lines(plan.title, steps, series, log=plan.log, most=plan.most)
    return Chart(plan.title, svg, series, plan.is_main)


def _moved(values: Sequence[float | None], by: Sequence[float | None], sign: int) -> list[float | None]:
    return [
        None if value is None or each is None else value + sign * each for value, each in zip(values, by, strict=True)
    ]


def _are_shares(means: Sequence[float | None], deviations: Sequence[float | None]) -> bool:
    """Whether every value can lie within [0, 1]: there a variance is at most m (1 - m), or twice that for a sample of
    two."""
    pairs = [pair for pair in zip(means, deviations, strict=True) if None not in pair]
    return all(m is not None and s is not None and 0 <= m <= 1 and s**2 <= 2.001 * m * (1 - m) + 1e-9 for m, s in pairs)


def held_out_chart(rows: Sequence[MetricsRow], before: float | None) -> list[Chart]:
    """The loss on held-out demonstrations; empty without any.

    Args: before: the loss before the first step.
    """
    measured = [
        (step, loss)
        for step, row in zip(steps_of(rows), rows, strict=True)
        if (loss := row.number("validation_loss")) is not None
    ]
    if not measured:
        return []
    # A line over all rows would have a gap after each point.
    steps, losses = zip(*([] if before is None else [(0, before)]), *measured, strict=True)
    title = HELD_OUT_LOSS
    series = [Series("loss", list(losses), 0)]
    return [Chart(title, plots.draw_lines(title, list(steps), series), series)]


def evaluation_charts(curves: Mapping[str, Sequence[Mapping[str, Any]]], best: Mapping[str, Any] | None) -> list[Chart]:
    """One chart for each environment on which the run's policy was evaluated; a point of its own marks the best."""
    charts = []
    for name, points in curves.items():
        title = f"Evaluation: {name}"
        band = ([each["low"] for each in points], [each["high"] for each in points])
        series = [Series("mean reward, 95 % interval", [each["mean"] for each in points], 0, band)]
        if best and best["evaluation"] == name:
            marked = [each["mean"] if each["step"] == best["step"] else None for each in points]
            series.append(Series(f"best, step {best['step']}", marked, 2))
        charts.append(Chart(title, plots.draw_lines(title, [each["step"] for each in points], series), series))
    return [chart for chart in charts if chart.svg]


def overlaid_charts(names: Sequence[str], groups: Sequence[Sequence[Sequence[MetricsRow]]]) -> list[Chart]:
    """Every curve of several configurations: one line each for the mean over its runs, shaded from the lowest to the
    highest.

    Args: groups: for each name, the rows of its runs.
    """
    everything = [row for runs in groups for rows in runs for row in rows]
    steps = sorted(set(steps_of(everything)))
    charts = []
    for plan in plans_of(everything):
        field, label = plan.lines[0]
        series = [
            over_runs(name, steps, [_by_step(rows, field) for rows in runs], style % COLOURS)
            for style, (name, runs) in enumerate(zip(names, groups, strict=True))
        ]
        title = plan.title if len(plan.lines) == 1 else f"{plan.title}, {label}"
        svg = plots.draw_lines(title, steps, series, log=plan.log, most=plan.most)
        charts.append(Chart(title, svg, [line for line in series if any(v is not None for v in line.values)],
                            plan.is_main))  # fmt: skip
    return [chart for chart in charts if chart.svg]


def overlaid_losses(names: Sequence[str], groups: Sequence[Sequence[Sequence[MetricsRow]]]) -> list[Chart]:
    """The same for held-out losses of runs on demonstrations, over the steps that measured them; empty without any."""
    measured = [[[row for row in rows if row.number("validation_loss") is not None] for rows in runs]
                for runs in groups]  # fmt: skip
    steps = sorted({step for runs in measured for rows in runs for step in steps_of(rows)})
    series = [
        over_runs(name, steps, [_by_step(rows, "validation_loss") for rows in runs], style % COLOURS)
        for style, (name, runs) in enumerate(zip(names, measured, strict=True))
        if any(runs)
    ]
    svg = plots.draw_lines(HELD_OUT_LOSS, steps, series) if series else ""
    return [Chart(HELD_OUT_LOSS, svg, series, True)] if svg else []


def overlaid_evaluations(
    names: Sequence[str], groups: Sequence[Sequence[Mapping[str, Sequence[Mapping[str, Any]]]]]
) -> list[Chart]:
    """The same for evaluations on held-out prompts.

    Args: groups: for each name, the evaluation curves of its runs.
    """
    charts = []
    for environment in dict.fromkeys(name for runs in groups for curves in runs for name in curves):
        found = [
            [{point["step"]: point["mean"] for point in curves.get(environment, ())} for curves in runs]
            for runs in groups
        ]
        steps = sorted({step for runs in found for points in runs for step in points})
        series = [
            over_runs(name, steps, runs, style % COLOURS)
            for style, (name, runs) in enumerate(zip(names, found, strict=True))
        ]
        title = f"Evaluation: {environment}"
        charts.append(Chart(title, plots.draw_lines(title, steps, series), series))
    return [chart for chart in charts if chart.svg]


def over_runs(name: str, steps: Sequence[int], runs: Sequence[Mapping[int, float | None]], style: int) -> Series:
    """The mean over the runs that have a value, and the lowest and highest if there are several runs."""
    found = [[value for run in runs if (value := run.get(step)) is not None] for step in steps]
    band = None
    if len(runs) > 1:
        band = ([min(each, default=None) for each in found], [max(each, default=None) for each in found])
    return Series(name, [fmean(each) if each else None for each in found], style, band)


def _by_step(rows: Sequence[MetricsRow], field: str) -> dict[int, float | None]:
    return dict(zip(steps_of(rows), (row.number(field) for row in rows), strict=True))
