"""The table of the operator's scale: numbers with their bounds, computed from episodes and counters.

Belongs here: arithmetic and the table. Does not belong here: running anything (`operator_scale`).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median
from typing import Any

MIB = 2**20
NUM_BARE = 200
"""Number of runs that a bare client writes: enough to measure the time of one."""
WRITES = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True)
class Row:
    """One measured number and its bound; `None` if it is only reported."""

    what: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def is_met(self) -> bool:
        return self.limit is None or self.value <= self.limit


@dataclass(frozen=True)
class Episode:
    """What happened between two points in time."""

    seconds: float
    writes: dict[str, int]
    """Number by verb and resource, without writes of the Lease."""
    reads: int
    changes: int
    passes: int
    mean_pass: float
    p99_pass: float
    """From taking the run out of the queue until everything is written; its time in the queue is `p99_wait`."""
    p99_wait: float
    cpu: float
    """CPU seconds of the operator."""
    rest: dict[str, float]
    """CPU seconds of every other program that takes part, by name; the last is this one."""
    others: float
    """Cores that the rest of the machine kept busy."""
    resident: int

    @property
    def num_writes(self) -> int:
        return sum(self.writes.values())


Samples = dict[tuple[str, ...], float]


def quantile(what: str, first: Samples, last: Samples, part: float) -> float:
    """Quantile of a histogram's observations between two scrapes, interpolated within its bucket.

    Infinity beyond the last bucket, which becomes null in JSON.
    """
    name = f"orbit_operator_{what}_seconds_bucket"
    counts = sorted(
        (float(key[1].replace("+Inf", "inf")), count - first.get(key, 0))
        for key, count in last.items()
        if key[0] == name
    )
    total = counts[-1][1] if counts else 0
    lower, below = 0.0, 0.0
    for bound, count in counts:
        if total and count >= part * total:
            if bound == float("inf"):
                return bound
            return lower + (bound - lower) * (part * total - below) / max(1.0, count - below)
        lower, below = bound, count
    return 0.0


def rows_of(facts: dict[str, Any]) -> list[Row]:
    """The table's rows with their bounds; with more than a thousand runs, those for a thousand are only reported."""
    few = facts["runs"] <= 1000
    changing = [name for name in ("start", "crash", "suspend", "resume", "complete") if name in facts]
    change = [facts[name] for name in changing]
    served, bare = facts["served after"] / facts["runs"], _bare_seconds(facts) / NUM_BARE
    busy = {name: facts[name] for name in ("create", *changing[:1], "train", *changing[1:]) if name in facts}
    rows = [
        Row("created to each having its Job and its status", facts["served after"], "s", 60 if few else None),
        Row("of that, until the last was created", facts["created after"], "s"),
        Row("against a bare client that makes the same runs and writes", served / bare, "x"),
        Row("pass over one run, p99 in the slowest episode", max(each.p99_pass for each in busy.values()), "s", 1.0),
        *(Row(f"  {name}", each.p99_pass, "s") for name, each in busy.items()),
        Row("wait for a worker before it, p99 in the slowest", max(each.p99_wait for each in busy.values()), "s"),
        Row("operator's CPU per run, start", 1000 * facts["start"].cpu / facts["runs"], "ms"),
        Row("operator's CPU per run, creation", 1000 * facts["create"].cpu / facts["runs"], "ms"),
        *(Row(f"  {name}'s", 1000 * seconds / facts["runs"], "ms") for name, seconds in facts["create"].rest.items()),
        Row("resident memory, most ever", facts["resident highest"] / MIB, "MiB", 128 if few else None),
        Row("resident memory, with 15 runs", facts["resident empty"] / MIB, "MiB"),
        *(Row(f"a bare client's time per run, {when}", 1000 * facts[name] / NUM_BARE, "ms")
          for when, name in (("few runs", "bare"), ("many runs", "bare, many runs"))),
        Row("API writes per run, creation", facts["create"].num_writes / facts["runs"], ""),
        Row("API writes per change of state, after creation",
            sum(each.num_writes for each in change) / sum(each.changes for each in change), "", 3.0),
        *(Row(f"  {name}", facts[name].num_writes / max(1, facts[name].changes), "") for name in changing),
        Row("CPU, all runs train and nothing changes", _share(facts["idle"]), "%", 2.0 if few else None),
        *(Row(what, _share(facts[name]), "%", limit) for what, name, limit in (
            ("CPU, most runs finished", "idle, most finished", 2.0 if few else None),
            ("CPU, every run reports a new step each time", "train", None),
        ) if name in facts),
        Row("kubectl apply to pod, few runs, median", median(facts["apply, few runs"]), "s", 1.0),
        Row("kubectl apply to pod, many runs, median", median(facts["apply, many runs"]), "s", 1.0),
        Row("cores taken by others while creating", facts["create"].others, ""),
    ]  # fmt: skip
    return rows


def compare_sizes(few: dict[str, Any], many: dict[str, Any]) -> list[Row]:
    """Rows that show whether anything grows faster than the number of runs: ratios of ratios."""
    factor = many["runs"] / few["runs"]

    def grown(facts: dict[str, Any]) -> float:
        return float(facts["resident highest"] - facts["resident empty"])

    where = f"{many['runs']} runs against {few['runs']}, per run"
    return [
        Row(f"time to Job and status: {where}", many["served after"] / few["served after"] / factor, "x", 1.0),
        Row("the same, each against its bare client", (many["served after"] / _bare_seconds(many))
            / (few["served after"] / _bare_seconds(few)) / factor, "x"),
        Row(f"memory above that with 15 runs: {where}", grown(many) / grown(few) / factor, "x", 1.0),
        Row(f"operator's CPU for creation: {where}", many["create"].cpu / few["create"].cpu / factor, "x", 1.0),
        *(Row(f"  {name}'s", seconds / few["create"].rest[name] / factor, "x")
          for name, seconds in many["create"].rest.items()),
    ]  # fmt: skip


def table(rows: list[Row]) -> str:
    lines = [f"{'what':<76} {'measured':>10} {'bound':>8}"]
    for row in rows:
        bound = "" if row.limit is None else f"{row.limit:g}"
        miss = "" if row.is_met else "  MISSED"
        lines.append(f"{row.what:<76} {row.value:>10.3f} {bound:>8} {row.unit}{miss}")
    return "\n".join(lines)


def _bare_seconds(facts: dict[str, Any]) -> float:
    """Mean of before and after: Kubernetes' own share of a run grows with the number of nodes in use."""
    return mean((facts["bare"], facts["bare, many runs"]))


def _share(episode: Episode) -> float:
    return 100 * episode.cpu / episode.seconds


def count_writes(samples: dict[tuple[str, ...], float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, count in samples.items():
        if key[0] == "orbit_operator_api_requests_total" and key[3] in WRITES and key[2] != "leases":
            name = f"{key[3]} {key[2]} {key[1]}"
            found[name] = found.get(name, 0) + count
    return found


def count_reads(samples: dict[tuple[str, ...], float]) -> float:
    return sum(count for key, count in samples.items()
               if key[0] == "orbit_operator_api_requests_total" and key[3] == "GET" and key[2] != "leases")  # fmt: skip


def count_passes(samples: dict[tuple[str, ...], float]) -> float:
    return samples.get(("orbit_operator_reconcile_seconds_count",), 0.0)
