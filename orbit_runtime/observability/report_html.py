"""`report.html`: one self-contained page of a run, readable offline, on a phone and on paper.

Belongs here: which tables a page shows, and rendering the template with everything escaped.
Does not belong here: numbers (`report`), which charts (`charts`), drawing (`plots`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from orbit_runtime.observability.charts import (
    build_charts,
    evaluation_charts,
    held_out_chart,
    overlaid_charts,
    overlaid_evaluations,
    overlaid_losses,
)
from orbit_runtime.observability.compare import FORMULA, RunComparison
from orbit_runtime.observability.metrics import FIELDS, format_value
from orbit_runtime.observability.report import Report, evaluation_curves, manifest_of
from orbit_runtime.observability.run_folder import RunFolder
from orbit_runtime.observability.samples import shorten

if TYPE_CHECKING:
    import jinja2

MAX_TABLE_ROWS = 500
NOT_KEPT = "numbers not kept"
EQUAL, DIFFERENT, NOT_READ = "equal", "different", "not readable"
SCRIPTS = ("page.js", "rollouts.js")


def render_html(report: Report, *, is_live: bool = False) -> str:
    """The page of one run. Completions are untrusted: all text is escaped, and the page's content policy allows only
    its own script.

    Args: is_live: the run's port serves the page, which requests the newest state and other steps' rollouts from it.
    """
    facts = report.to_json()
    validated = report.folder.summary.get("validated") or {}
    return render_page(
        "report.html.j2",
        title=report.title,
        report=report,
        facts=facts,
        charts=[
            *evaluation_charts(facts["evaluation"], facts["best"]),
            *held_out_chart(report.rows, validated.get("first")),
            *build_charts(report.rows),
        ],
        sampled=report.sampled,
        table=_rollout_table(report, is_live),
        is_live=is_live,
        proofs=proof_lines(report.folder),
        manifest=json.dumps(manifest_of(report.folder.run), indent=2, ensure_ascii=False),
        resolved=report.folder.run.get("resolved"),
        fields=_fields(report),
        rows=report.rows[-MAX_TABLE_ROWS:],
        hidden_rows=max(0, len(report.rows) - MAX_TABLE_ROWS),
    )


def _fields(report: Report) -> list[str]:
    """The rows that have at least one value."""
    known = dict.fromkeys([*FIELDS, *(name for row in report.rows for name in row)])
    return [name for name in known if any(row.get(name) is not None for row in report.rows)]


def _rollout_table(report: Report, is_live: bool) -> str | None:
    """The groups for the page's script, as JSON that no browser interprets as markup."""
    if report.sampled is None or not report.sampled.steps:
        return None
    content = {
        "live": is_live,
        "kept": len(report.folder.rollouts),
        "steps": [each.step for each in (report.folder.rollouts if is_live else report.sampled.steps)],
        "next": {page.step: page.following for page in report.sampled.steps if page.following is not None},
        "pages": {page.step: page.groups for page in report.sampled.steps},
    }
    return embedded_json(content)


def embedded_json(content: Any) -> str:
    """JSON that is safe inside a `<script>`, whatever its texts."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def render_comparison(comparison: RunComparison) -> str:
    """The page that compares several runs."""
    names = [each.name for each in comparison.configurations]
    groups = [[comparison.reports[at] for at in each.members] for each in comparison.configurations]
    return render_page(
        "compare.html.j2",
        title="Comparison of runs",
        comparison=comparison,
        formula=FORMULA,
        steps=max(len(report.rows) for report in comparison.reports),
        charts=[
            *overlaid_evaluations(
                names, [[evaluation_curves(each.folder.evaluations) for each in runs] for runs in groups]
            ),
            *overlaid_losses(names, [[each.rows for each in runs] for runs in groups]),
            *overlaid_charts(names, [[each.rows for each in runs] for runs in groups]),
        ],
    )


def _duration(seconds: float) -> str:
    """Example: `_duration(9000) == "2 h 30 min"`"""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


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
    environment.filters["short"] = shorten
    environment.filters["duration"] = _duration
    environment.tests["digest"] = lambda value: bool(re.fullmatch("[a-z0-9]+:[0-9a-f]{16,}", str(value)))
    environment.filters["digest"] = lambda value: "-" if not value else str(value)[:19] + "…"
    return environment


def render_page(template: str, **context: Any) -> str:
    """A template from this folder with its own style and scripts, and nothing external."""
    folder = resources.files("orbit_runtime.observability") / "templates"
    style = (folder / "page.css").read_text()
    script = "\n".join((folder / name).read_text() for name in SCRIPTS)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    if context.get("is_live"):
        policy += "; connect-src 'self'"
    return _environment().get_template(template).render(**context, style=style, script=script, policy=policy)


@dataclass(frozen=True, slots=True)
class ProofLine:
    """One adapter and its proof. A check that was not made, or whose number was not stored, is None."""

    version: Any
    digest: str | None
    verdict: str
    """`proven`, `whole`, `unproven`, `failed` or `numbers not kept`."""
    engine_bytes: str | None
    """Comparison of the adapter's bytes in the engine's slot with the published bytes."""
    layers_bytes: str | None
    """Comparison of what the layers of both sides applied with what the bytes require."""
    error: float | None
    """Largest difference between the two sides' changes on the canary, in nats per token."""
    limit: float | None
    change: float | None
    """Largest change of a token by the adapter, the scale for `error`."""
    effect: float | None
    """Share of the adapter's effect that the engine shows."""
    top1: float | None
    base_error: float | None
    """Mean difference between the two sides without the adapter."""
    said: tuple[str, ...]
    """Messages: what failed, and what the engine's noise hides."""


def proof_lines(folder: RunFolder) -> list[ProofLine]:
    """Newest first."""
    kept = {
        checkpoint["facts"].get("policy_version"): checkpoint["facts"].get("proof")
        for checkpoint in folder.checkpoints
        if isinstance(checkpoint.get("facts"), Mapping)
    }
    lines = []
    for adapter in folder.adapters:
        facts = adapter.get("facts", {})
        proof = facts.get("proof") or kept.get(facts.get("version"))
        lines.append(_line(facts.get("version"), facts.get("digest"), proof if isinstance(proof, Mapping) else None))
    return lines


def _line(version: Any, digest: Any, proof: Mapping[str, Any] | None) -> ProofLine:
    told = proof or {}
    effect = told.get("effect")
    return ProofLine(
        version=version,
        digest=None if digest is None else str(digest),
        verdict=NOT_KEPT
        if proof is None
        else str(told.get("verdict") or ("proven" if told.get("proven") else "failed")),
        engine_bytes=_slot(told),
        layers_bytes=_layers(told),
        error=_number(told.get("change_error")),
        limit=_number(told.get("change_limit")),
        change=_number(told.get("change_from_base")),
        effect=_number(effect.get("scale")) if isinstance(effect, Mapping) else None,
        top1=_number(told.get("top1")),
        base_error=_number(told.get("base_error")),
        said=tuple(str(each) for name in ("failures", "unresolved") for each in told.get(name) or ()),
    )


def _slot(proof: Mapping[str, Any]) -> str | None:
    if "digest" not in proof:
        return None
    if proof.get("slot_digest") is None:
        return NOT_READ
    return EQUAL if proof["slot_digest"] == proof["digest"] else DIFFERENT


def _layers(proof: Mapping[str, Any]) -> str | None:
    expected = proof.get("expected_applied_digest")
    if expected is None:
        return None
    sides = [side for name in ("applied_digest", "trainer_applied_digest") if (side := proof.get(name)) is not None]
    return EQUAL if all(side == expected for side in sides) else DIFFERENT


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
