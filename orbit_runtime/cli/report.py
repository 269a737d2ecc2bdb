"""`orbit report`: one run's report, or several runs compared.

Belongs here: reading the folders, writing the page, printing. Does not belong here: the numbers (`observability`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orbit_runtime.cli.output import AsJson, complete_runs, format_json, format_number, format_table, outcomes
from orbit_runtime.errors import OutputError, UsageError

if TYPE_CHECKING:
    from orbit_runtime.observability.compare import RunComparison, RunEntry
    from orbit_runtime.observability.report import Report
    from orbit_runtime.storage import Store


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="DIR", help="Run folders: paths or URIs.", autocompletion=complete_runs)
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write the page here instead of into a local run's own folder.")
    ] = None,
    margin: Annotated[
        float, typer.Option(metavar="REWARD", help="For several runs: the smallest difference that matters.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Report one run, or compare several with the first. A run need not be finished.

    \f
    Without `--html` and `--json`, a local run's `report.html` and `report.json` are written anew in its folder.
    """
    import json

    from orbit_runtime.observability.report_html import render_html

    read = [_read(uri) for uri in runs]
    if len(read) > 1:
        _report_several([each for _, each in read], html=html, margin=margin, as_json=as_json)
        return
    store, found = read[0]
    place = html
    if html is not None:
        _write(html, render_html(found))
    elif not as_json and store.root is not None:
        place = store.root / "report.html"
        _write(place, render_html(found))
        _write(store.root / "report.json", json.dumps(found.to_json(), indent=1))
    if as_json:
        print(format_json(found.to_json()))
    else:
        print(format_report(found))
        print(f"page                {place}" if place else "page                not written; name a file with --html")


def _read(uri: str) -> tuple[Store, Report]:
    from orbit_runtime.observability.report import build_report
    from orbit_runtime.storage import open_store

    store = open_store(uri, writable=False)
    report = build_report(store)
    if not report.folder.run and store.exists("evaluation.json"):
        raise UsageError(
            "this is an evaluation, which has a page of its own",
            where=store.uri,
            fix=f"open {store.uri}/report.html, or read summary.json; `orbit eval` makes both anew",
        )
    if report.status == "empty" and not report.folder.run:
        raise UsageError("there is no run here", where=store.uri, fix="name a run folder; `orbit ls URI` lists them")
    return store, report


def format_report(report: Report) -> str:
    """A run in a dozen lines."""
    facts = report.to_json()
    status = facts["status"] if not facts["reason"] else f"{facts['status']}: {facts['reason']}"
    of = _asked(facts["steps"], facts["steps_total"])
    same = "-" if not facts["base_digest_after"] else _same(facts["base_digest_before"], facts["base_digest_after"])
    parity = facts["parity"]
    lines = [
        ("run", facts["run"]),
        ("state", status),
        ("steps", f"{facts['steps']}{of}, {facts['seconds']:.1f} s, {facts['tokens']} tokens"),
        *outcomes(facts),
        *((f"reward {name}", f"{format_number(part['first'])} in the first step, "
                             f"{format_number(part['last'])} in the last")
          for name, part in facts["reward_parts"].items()),
        ("publishes proven", f"{facts['publishes_proven']} of {facts['publishes']}"),
        ("parity", f"worst mean {format_number(parity['mean_max'], '.2g')}, "
                   f"limit {format_number(parity['limit'], '.2g')}"),
        ("frozen base", same),
        ("adapter", str(facts["adapter_digest"] or "-")),
        ("last checkpoint", str(facts["last_checkpoint"] or "-")),
        ("resumed", f"{facts['resumed']} times"),
    ]  # fmt: skip
    lines += [("warning", warning) for warning in facts["warnings"]]
    return "\n".join(f"{name:<18}  {value}" for name, value in lines)


def _asked(done: int, total: int | None) -> str:
    if not total:
        return ""
    return f" of {total}" if done <= total else f" (the manifest asks for {total} now)"


def _same(before: str | None, after: str) -> str:
    return "unchanged" if before == after else "CHANGED"


def _report_several(reports: list[Report], *, html: Path | None, margin: float, as_json: bool) -> None:
    from orbit_runtime.observability.compare import compare
    from orbit_runtime.observability.report_html import render_comparison

    comparison = compare(reports, margin)
    if html is not None:
        _write(html, render_comparison(comparison))
    if as_json:
        print(format_json(comparison.to_json()))
    else:
        print(format_comparison(comparison))
        if html is not None:
            print(f"page: {html}")


def format_comparison(comparison: RunComparison) -> str:
    """The verdicts as a table, then what differs."""
    from orbit_runtime.observability.compare import FORMULA

    measure = comparison.measure
    rows = [
        [
            entry.name,
            str(entry.steps),
            format_number(entry.final.value),
            format_number(entry.final.standard_error),
            format_number(entry.difference, "+.4f"),
            format_number(entry.margin),
            entry.verdict,
        ]
        for entry in comparison.entries
    ]
    lines = [format_table(["run", "steps", measure.name, "se", "difference", "margin", "verdict"], rows), ""]
    k = comparison.entries[0].final.steps
    better = ", lower is better" if measure.is_lower_better else ""
    what = f"{measure.name}: mean of the last {k} {measure.steps}{better}"
    lines.append(f"{what}; margin: {FORMULA} (asked: {comparison.asked_margin})")
    if comparison.has_seeds:
        lines += ["", *_by_configuration(comparison)]
    else:
        lines.append("each run is one seed: the spread between seeds is not part of the margin")
    for entry in comparison.entries[1:]:
        if entry.other_task:
            differ = ", ".join(entry.other_task)
            lines.append(f"{entry.name} is another task: {differ} differ; its {measure.name} is on another scale")
        if entry.same_length is not None:
            lines.append(_length_note(entry, comparison.entries[0]))
        lines += [f"{entry.name}: {path} is {new!r}, not {old!r}" for path, old, new in entry.changed]
    return "\n".join(lines)


def _by_configuration(comparison: RunComparison) -> list[str]:
    header = ["configuration", "seeds", comparison.measure.name, "se", "difference", "margin", "verdict"]
    rows = [
        [
            each.name,
            str(each.seeds),
            format_number(each.value),
            format_number(each.standard_error),
            format_number(each.difference, "+.4f"),
            format_number(each.margin),
            each.verdict,
        ]
        for each in comparison.configurations
    ]
    return [format_table(header, rows), "se: between seeds, or within the runs if that is larger"]


def _length_note(entry: RunEntry, first: RunEntry) -> str:
    same = entry.same_length
    assert same is not None
    return (
        f"{entry.name} has {entry.steps} steps, {first.name} {first.steps}: the verdict compares the end of one with "
        f"the end of the other. After {same.steps} steps of each: {same.verdict} "
        f"(difference {format_number(same.difference, '+.4f')}, margin {format_number(same.margin)})"
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fix = "name another file with --html"
        raise OutputError(f"cannot be written: {error.strerror}", where=str(path), fix=fix) from error
