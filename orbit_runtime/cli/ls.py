"""`orbit ls`: the runs in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from orbit_runtime.cli.output import AsJson, complete_runs, format_bytes, format_json, format_number, format_table
from orbit_runtime.errors import UsageError

if TYPE_CHECKING:
    from orbit_runtime.storage import Store


def list_runs(
    uri: Annotated[
        str, typer.Argument(metavar="URI", help="A folder of runs, or one run.", autocompletion=complete_runs)
    ] = "runs",
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder. Shows step, reward, state, last checkpoint and size.

    \f
    No runs is an answer, a missing local folder is a mistake.
    """
    from orbit_runtime.storage import open_store

    store = open_store(uri, writable=False)
    if store.root is not None and not store.root.is_dir():
        raise UsageError("there is no such folder", where=str(store.root), fix="name the folder that holds the runs")
    runs = describe_runs(store, uri)
    if as_json:
        print(format_json(runs))
        return
    if not runs:
        print(f"no runs in {store.uri}")
        return
    header = ["run", "step", "reward", "state", "last checkpoint", "size"]
    rows = [
        [
            run["folder"],
            f"{run['step']}/{run['total'] or '?'}",
            format_number(run["reward"]),
            run["state"],
            run["last_checkpoint"] or "-",
            format_bytes(run["size_bytes"]),
        ]
        for run in runs
    ]
    print(format_table(header, rows))


def describe_runs(store: Store, uri: str) -> list[dict[str, Any]]:
    """`folder, run, uri, step, total, reward, state, last_checkpoint, size_bytes` of each run, by folder."""
    from orbit_runtime.storage import open_store

    if store.exists("run.json"):
        return [_describe(store, store.uri.rstrip("/").rsplit("/", 1)[-1])]
    found = []
    for folder in store.list_folders():
        if store.exists(f"{folder}run.json"):
            found.append(_describe(open_store(f"{uri.rstrip('/')}/{folder.rstrip('/')}", writable=False), folder[:-1]))
    return found


def _describe(store: Store, folder: str) -> dict[str, Any]:
    from orbit_runtime.observability.report import build_report

    report = build_report(store, samples=False)
    facts = report.to_json()
    return {
        "folder": folder,
        "run": facts["run"],
        "uri": store.uri,
        "step": facts["steps"],
        "total": facts["steps_total"],
        "reward": facts["reward_last"],
        "state": facts["status"],
        "last_checkpoint": facts["last_checkpoint"],
        "size_bytes": _size(store, report.folder.checkpoints + report.folder.adapters),
    }


def _size(store: Store, manifests: tuple[Any, ...]) -> int:
    """All files of a local run; of a remote one, what its checkpoints and adapters list."""
    if store.root is not None:
        return sum(path.stat().st_size for path in store.root.rglob("*") if path.is_file())
    return sum(int(part["bytes"]) for manifest in manifests for part in manifest.get("parts", {}).values())
