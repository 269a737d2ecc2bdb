"""Dozens of scripted runs that live beside other tests: what the pod of each does, and what befalls it.

Belongs here: the runs, and what happens to their pods without a test's help. Does not belong here: what became of them
(`test_node_faults`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.bed.cluster import Cluster
from cluster.bed.node import PLAIN_TAINT
from cluster.bed.pki import PLAIN_NODE
from cluster.by_hand import ROOT, Object, Team, wait_for
from cluster.operator_process import Operator
from cluster.real_node import (
    PATIENCE,
    build_scripted_image,
    container_of,
    node_of,
    open_real_team,
    read_log,
    start_scripted,
    wait_for_pod,
    wait_reason,
)

APART = {
    "gpus": 0,
    "nodeSelector": {"kubernetes.io/hostname": PLAIN_NODE},
    "tolerations": [{"key": PLAIN_TAINT.partition("=")[0], "operator": "Exists"}],
}
NOTHING = "\N{EN DASH}"
ONCE = {"maxInfraRestarts": 0, "maxUserRetries": 0}
WORDS = {"where": "spec.data", "message": "Größe 猫: zu klein", "fix": "mehr davon"}


def read_documented_endings() -> dict[int, tuple[str, str, str]]:
    """Exit code: reason, who acts, budget of a first occurrence; from the table that operators look it up in."""
    guide = (ROOT / "docs/guides/cluster/operations.md").read_text(encoding="utf-8")
    table = guide.split("### How an attempt ends")[1].split("###")[0]
    owners, budgets = {NOTHING: "None", "us": "Orbit"}, {NOTHING: "Free"}
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for code in re.findall(r"\b\d+\b(?! by)", cells[1]) if len(cells) == 5 else ():
            budget = cells[3].split(",")[0].strip()
            owner = owners.get(cells[2], cells[2].capitalize())
            found[int(code)] = (cells[0], owner, budgets.get(budget, budget.capitalize()))
    return found


ENDINGS = read_documented_endings()
for code in (126, 128, 134, 135):
    del ENDINGS[code]  # Told apart from 127 and 139 by nothing but the number; `unit_operator/test_failure` has them.
LONGEST = "n" * 52
STORIES: dict[str, tuple[Object, Object]] = {
    **{f"exit-{code}": ({"exit": code, "words": json.dumps(WORDS)}, {"lifecycle": ONCE}) for code in ENDINGS},
    LONGEST: ({"exit": 0}, {}),
    "no-image": ({}, {"placement": {"image": "localhost/there-is-no-such-image:1"}}),
    "no-secret": ({}, {"placement": {"envFromSecrets": ["made-later"]}}),
    "no-config-map": ({}, {"environment": {"code": {"uri": "configmap://made-later"}}}),
    # Of a model that the planner knows it would say beforehand that this is too little.
    "eats": (
        {"eat": 1},
        {"lifecycle": ONCE, "placement": {"resources": {"memory": "64Mi"}}, "model": {"uri": "hf://nobody/knows@main"}},
    ),
    "fills": (
        {"fill": 16, "deaf": True},
        {"lifecycle": ONCE, "placement": {"modelCache": {"sizeLimit": "1Mi"}}},
    ),
    "honest": ({"serve": "honest"}, {}),
    "hangs": ({"serve": "hang"}, {}),
    "lies": ({"serve": "lie"}, {}),
    "floods": ({"serve": "flood"}, {}),
    "killed": ({"attempts": {"2": {"exit": 0}}}, {}),
    "deleted": ({"attempts": {"2": {"exit": 0}}}, {}),
    "drained": ({"attempts": {"2": {"exit": 0}}}, {}),
    "deaf": ({"deaf": True}, {"lifecycle": {**ONCE, "terminationGracePeriodSeconds": 2}}),
    "held": ({"attempts": {"2": {"exit": 0}}}, {}),
    "paused": ({"attempts": {"2": {"exit": 0}}}, {}),
    "gone-running": ({}, {}),
    "gone-suspended": ({}, {}),
}
"""Name of a run: what its pod is told, and what else its manifest says. All start at once: a pod that waits is idle."""


@dataclass
class Stories:
    """All of them, under way."""

    team: Team
    operator: Operator
    befallen: dict[str, Future[Object | None]]
    """Run's name → what was seen before it happened."""
    ending: ExitStack

    def end(self) -> None:
        """Takes everything away; may be asked again."""
        self.ending.close()


@contextmanager
def run_stories(cluster: Cluster, log: Path) -> Iterator[Stories]:
    """Starts all of them at once, on the node without GPUs: nobody else loses that one, or drains it."""
    cluster.import_image(build_scripted_image(), everywhere=True)
    with ExitStack() as ending:
        team, operator = ending.enter_context(open_real_team(cluster, "node-faults", log))
        for name, (told, spec) in STORIES.items():
            start_scripted(team, name, told, **{**spec, "placement": {**APART, **spec.get("placement", {})}})
        befalls = list_befalls(cluster, team)
        pool = ending.enter_context(ThreadPoolExecutor(len(befalls)))
        befallen = {run: pool.submit(befall, run) for run, befall in befalls.items()}
        yield Stories(team, operator, befallen, ending)


def list_befalls(cluster: Cluster, team: Team) -> dict[str, Callable[[str], Object | None]]:
    """What happens to pods that run, or cannot start: each then takes its time, mostly waiting."""

    def live_pod(run: str) -> Object:
        """One that hears signals: a container runs for a while before."""
        pod = wait_for_pod(team, run, seconds=PATIENCE)
        wait_for(lambda: "scripted:" in read_log(cluster, pod), f"{run} was told what to do", PATIENCE)
        return pod

    def kill(run: str) -> None:
        pod = live_pod(run)
        node_of(cluster, pod).ctr("tasks", "kill", "--signal", "SIGKILL", container_of(pod))

    def delete(run: str) -> None:
        team.server.delete(team.path("pods", live_pod(run)["metadata"]["name"]))

    def evict(run: str) -> None:
        """Evicts the pod as `kubectl drain` does."""
        name = live_pod(run)["metadata"]["name"]
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        team.server.create(team.path("pods", name, "eviction"), eviction)

    def hold(run: str) -> None:
        """Somebody's finalizer keeps the object when the process is gone."""
        name = live_pod(run)["metadata"]["name"]
        team.server.merge(team.path("pods", name), {"metadata": {"finalizers": ["example.com/audit"]}})
        team.server.delete(team.path("pods", name))

    def suspend(run: str) -> None:
        live_pod(run)
        team.edit_run(run, lifecycle={"suspend": True})

    def supply_secret(run: str) -> Object:
        seen = wait_reason(team, run, "ConfigurationMissing", PATIENCE)
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "made-later"}}
        team.server.apply(team.path("secrets", "made-later"), secret)
        return seen

    def supply_config_map(run: str) -> Object:
        seen = wait_reason(team, run, "VolumeMissing", PATIENCE, says="not found")
        wanted = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "made-later"}}
        team.server.apply(team.path("configmaps", "made-later"), {**wanted, "data": {"reward.py": ""}})
        return seen

    return {
        "no-secret": supply_secret, "no-config-map": supply_config_map, "killed": kill, "deleted": delete,
        "drained": evict, "deaf": delete, "held": hold, "paused": suspend, "gone-suspended": suspend,
    }  # fmt: skip
