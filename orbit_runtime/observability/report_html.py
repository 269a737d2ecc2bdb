"""`report.html`: one self-contained page of a run, readable offline, on a phone and on paper.

Belongs here: which charts and tables a page shows, and rendering the template with everything escaped.
Does not belong here: numbers (`report`), drawing (`plots`).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from orbit_runtime.observability import plots
from orbit_runtime.observability.metrics import FIELDS, STAGES, MetricsRow, format_value
from orbit_runtime.observability.report import Report, manifest_of
from orbit_runtime.observability.run_folder import Shown

if TYPE_CHECKING:
    import jinja2

    from orbit_runtime.observability.compare import Comparison

MAX_TEXT = 600
MAX_TABLE_ROWS = 500


def render_html(report: Report) -> str:
    """The page of one run. Completions are untrusted: all text is escaped, and the page's policy forbids any script
    but its own."""
    facts = report.to_json()
    return render_page(
        "report.html.j2",
        title=report.name,
        report=report,
        facts=facts,
        gain=_difference(facts["reward_last"], facts["reward_first"]),
        charts=[*held_out_chart(report), *evaluation_charts(facts["evaluation"]), *build_charts(report.rows)],
        samples=_pair(report.folder.first, report.folder.last),
        proofs=_proofs(report),
        manifest=json.dumps(manifest_of(report.folder.run), indent=2, ensure_ascii=False),
        resolved=report.folder.run.get("resolved"),
        fields=(*FIELDS, *dict.fromkeys(name for row in report.rows for name in row if name not in FIELDS)),
        rows=report.rows[-MAX_TABLE_ROWS:],
        hidden_rows=max(0, len(report.rows) - MAX_TABLE_ROWS),
    )


def render_comparison(comparison: Comparison) -> str:
    """The page of several runs side by side."""
    names = [entry.name for entry in comparison.entries]
    steps = sorted({int(row.number("step") or 0) for report in comparison.reports for row in report.rows})
    series = []
    for style, (name, report) in enumerate(zip(names, comparison.reports, strict=True)):
        by_step = {int(row.number("step") or 0): row.number("reward_mean") for row in report.rows}
        series.append(plots.Series(name, [by_step.get(step) for step in steps], style % 6))
    chart = {"title": "Reward", "svg": plots.draw_lines("Reward of each run", steps, series), "legend": series}
    return render_page("compare.html.j2", title="Comparison of runs", comparison=comparison, chart=chart)


def build_charts(rows: tuple[MetricsRow, ...]) -> list[dict[str, Any]]:
    """Title, SVG and legend of each chart of a run."""
    steps = [int(row.number("step") or 0) for row in rows]

    def line(name: str, label: str, style: int = 0) -> plots.Series:
        return plots.Series(label, [row.number(name) for row in rows], style)

    def part(name: str) -> plots.Series:
        return plots.Series("mean", [row.reward_parts.get(name) for row in rows], 0)

    def chart(title: str, *series: plots.Series, log: bool = False) -> dict[str, Any]:
        return {"title": title, "svg": plots.draw_lines(title, steps, series, log=log), "legend": series}

    replayed = (
        line("parity_mean_replayed", "through rollout's experts"),
        line("parity_mean_unreplayed", "through the trainer's own", 1),
    )
    # A run that recorded no experts has no such chart.
    replay = (
        [chart("Parity with and without router replay", *replayed, log=True)]
        if any(value is not None for value in replayed[0].values)
        else []
    )
    stages = [line(f"seconds_{stage}", stage, style) for style, stage in enumerate(STAGES)]
    rewards = dict.fromkeys(name for row in rows for name in row.reward_parts)
    charts = [
        chart("Reward", line("reward_mean", "mean"), line("reward_std", "standard deviation", 1)),
        *(chart(f"Reward {name}, before its weight", part(name)) for name in rewards),
        chart("Train-rollout parity |Δ log-prob|", line("parity_mean", "mean"), line("parity_max", "max", 1),
              line("parity_limit", "limit of the mean", 9), log=True),
        chart("Top-1 agreement on the canary", line("parity_top1", "share")),
        *replay,
        chart("KL from the base (nats)", line("kl", "KL")),
        chart("Entropy (nats)", line("entropy", "entropy")),
        chart("Loss", line("loss", "loss")),
        chart("Gradient norm before clipping", line("grad_norm", "norm")),
        chart("Response length (tokens)", line("response_tokens_mean", "mean")),
        chart("Tokens per second", line("tokens_per_second", "whole step")),
        {"title": "Seconds of a step, by stage", "svg": plots.draw_stack("Seconds of a step, by stage", steps, stages),
         "legend": stages},
    ]  # fmt: skip
    # A chart without a number says nothing, but of a run that has not begun, which shows what will be there.
    return [each for each in charts if not rows or any(v is not None for s in each["legend"] for v in s.values)]


def held_out_chart(report: Report) -> list[dict[str, Any]]:
    """The loss of demonstrations that were held out, from before the first step on; none where nothing was."""
    points = [(int(row.number("step") or 0), row.number("validation_loss")) for row in report.rows]
    measured = [(step, loss) for step, loss in points if loss is not None]
    if not measured:
        return []
    first = (report.folder.summary.get("validated") or {}).get("first")
    # A line through every row would have a gap behind each point.
    steps, losses = zip(*([] if first is None else [(0, first)]), *measured, strict=True)
    title = "Loss of what was held out (nats a token)"
    series = [plots.Series("loss", list(losses), 0)]
    return [{"title": title, "svg": plots.draw_lines(title, list(steps), series), "legend": series}]


def evaluation_charts(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One for each environment that the run's policy was measured on."""
    charts = []
    for name, points in curves.items():
        title = f"Held-out prompts: {name}"
        band = ([each["low"] for each in points], [each["high"] for each in points])
        series = [plots.Series("mean reward, 95 % interval", [each["mean"] for each in points], 0, band)]
        svg = plots.draw_lines(title, [each["step"] for each in points], series)
        charts.append({"title": title, "svg": svg, "legend": series})
    return charts


def _pair(first: tuple[Shown, ...], last: tuple[Shown, ...]) -> list[tuple[Shown | None, Shown | None]]:
    """Before and after of the same prompt where both steps saw it, else simply one beside the other."""
    after = {shown.prompt_id: shown for shown in last}
    pairs: list[tuple[Shown | None, Shown | None]] = []
    for shown in first:
        pairs.append((shown, after.pop(shown.prompt_id, None)))
    left = list(after.values())
    filled = [(before, then or (left.pop(0) if left else None)) for before, then in pairs]
    return [*filled, *((None, then) for then in left)]


def _proofs(report: Report) -> list[dict[str, Any]]:
    """One line per adapter that is still kept."""
    proofs = {
        checkpoint["facts"].get("policy_version"): checkpoint["facts"].get("proof")
        for checkpoint in report.folder.checkpoints
        if isinstance(checkpoint.get("facts"), Mapping)
    }
    lines = []
    for adapter in report.folder.adapters:
        facts = adapter.get("facts", {})
        proof = facts.get("proof") or proofs.get(facts.get("version"))
        lines.append({"version": facts.get("version"), "digest": facts.get("digest"), "proof": proof})
    return lines


def _difference(last: float | None, first: float | None) -> float | None:
    return None if last is None or first is None else last - first


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT} more characters)"


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("orbit_runtime.observability", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["metric"] = lambda value, name: format_value(name, value)
    environment.filters["number"] = lambda value, spec=".4f": "-" if value is None else format(value, spec)
    environment.filters["short"] = _shorten
    environment.filters["digest"] = lambda value: "-" if not value else str(value)[:19] + "…"
    return environment


def render_page(template: str, **context: Any) -> str:
    """A template of this folder with the page's own style and script, and nothing from elsewhere."""
    folder = resources.files("orbit_runtime.observability") / "templates"
    style = (folder / "page.css").read_text()
    script = (folder / "page.js").read_text()
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    return _environment().get_template(template).render(**context, style=style, script=script, policy=policy)
