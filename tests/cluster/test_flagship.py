"""A large run's shape in a pod: ranks over Megatron-Core that divide a mixture of experts, and a real SGLang server.

The guide's manifest, unchanged: first by `orbit run` on this machine, then by `kubectl apply` on the node. It needs
SGLang's environment, and minutes: `make test-cluster-flagship`.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster.bed.cluster import Cluster
from cluster.bed.heavy import PYTHON_VARIABLE
from cluster.guide import find_block
from cluster.shell import Shell
from cluster.watching import find_pods, wait_status

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        PYTHON_VARIABLE not in os.environ,
        reason=f"no SGLang: {PYTHON_VARIABLE} is not set; `make test-cluster-flagship` makes and sets it",
    ),
]
Object = dict[str, Any]
STAGES = ("engine_floor", "trainer_floor", "base", "identity", "random", "policy")
LARGEST = 2e-5
"""Largest difference of any token's log-prob between the sides, in nats, in fp32."""
OFT = """  adapter:
    type: OFT
    oft: {blockSize: 32}
    experts: Shared
    targets: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj]
"""
LORA = """  adapter: {type: LoRA, lora: {rank: 8, alpha: 16}}
"""
"""LoRA, of the experts too: the outer side once, the inner one of each."""
LIMIT = "  lifecycle: {maxInfraRestarts: 0}\n  placement"


@dataclass(frozen=True)
class Both:
    """Run folders of one manifest, and the pod's last words in the API."""

    laptop: Path
    pod: Path
    status: Object
    seen: Object
    """The pod while it trained."""


@pytest.fixture(scope="module")
def both(release: Shell, cluster: Cluster) -> Both:
    (cluster.buckets / "orbit-runs").mkdir(exist_ok=True)
    release.follow("run", "Credentials")
    release.environment |= {PYTHON_VARIABLE: os.environ[PYTHON_VARIABLE], "OMP_NUM_THREADS": "1"}
    print(release.follow("run", "Ranks and SGLang in one pod", 0))
    with release.meanwhile("run", "Ranks and SGLang in one pod", 1):
        wait_status(cluster, "ranks", lambda status: status.get("step", 0) >= 1 or has_ended(status), "trains", 900)
        pod = the_pod(cluster, "ranks")
        print(release.run("kubectl logs --namespace team-a -l orbitrl.dev/run-name=ranks --tail=-1"))
    status = wait_status(cluster, "ranks", has_ended, "ends")
    print(release.run("kubectl logs --namespace team-a -l orbitrl.dev/run-name=ranks --tail=-1"))
    return Both(release.folder / "on-a-laptop", cluster.buckets / "orbit-runs/team-a/ranks", status, pod)


@dataclass(frozen=True)
class Faults:
    """Statuses of runs that something happened to."""

    killed: Object
    """Its second attempt trains."""
    last_words: str
    """The first pod's termination message."""
    suspended: Object
    small: Object


@pytest.fixture(scope="module")
def faults(both: Both, release: Shell, cluster: Cluster) -> Faults:
    """One run loses a rank, goes on, and is suspended; another has next to no shared memory."""
    start(release, "broken", {"steps: 4": "steps: 400"})
    start(release, "narrow", {"gpus: 8": "gpus: 8\n    resources: {sharedMemory: 64Mi}", "  placement": LIMIT})
    wait_status(cluster, "broken", lambda status: status.get("checkpoint", {}).get("step", 0) >= 2, "trains", 300)
    (victim, *_) = [each for each in psutil.process_iter(["name", "uids"]) if is_rank(each)]
    victim.kill()
    killed = wait_status(cluster, "broken", lambda status: status["attempt"] == 2, "a second attempt", 120)
    ended = next(each for each in find_pods(cluster, "broken") if each["status"].get("phase") == "Failed")
    last_words = ended["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
    step = killed["checkpoint"]["step"]
    wait_status(cluster, "broken", lambda status: status["checkpoint"]["step"] > step, "goes on", 300)
    suspend = json.dumps({"spec": {"lifecycle": {"suspend": True}}})
    release.run(f"kubectl patch orun broken --namespace team-a --type=merge -p '{suspend}'")
    suspended = wait_status(cluster, "broken", lambda status: status["phase"] == "Suspended", "is suspended", 120)
    small = wait_status(cluster, "narrow", has_ended, "has ended")
    release.run("kubectl delete orun broken narrow --namespace team-a --wait=true --timeout=2m")
    return Faults(killed, last_words, suspended, small)


@pytest.fixture(scope="module")
def others(both: Both, release: Shell, cluster: Cluster) -> dict[str, tuple[Object, Object]]:
    """Status and pod of the same run with LoRA, and with a container for the engine."""
    found = {}
    for name, changes in (("lora", {OFT: LORA}), ("split", {"gpus: 8": "gpus: 8\n    layout: Split"})):
        start(release, name, changes)
        wait_status(cluster, name, lambda status: status.get("step", 0) >= 1 or has_ended(status), "trains", 900)
        pod = the_pod(cluster, name)
        status = wait_status(cluster, name, has_ended, "ends")
        print(release.run(f"kubectl logs --namespace team-a -l orbitrl.dev/run-name={name} --all-containers --tail=-1"))
        found[name] = (status, pod)
        release.run(f"kubectl delete orun {name} --namespace team-a --wait=true --timeout=2m")
    return found


def the_pod(cluster: Cluster, name: str) -> Object:
    """The only one that this run has had."""
    pods = find_pods(cluster, name)
    assert len(pods) == 1, [each["status"].get("containerStatuses") for each in pods]
    return pods[0]


def start(shell: Shell, name: str, changes: dict[str, str]) -> None:
    """The guide's manifest under another name."""
    text = find_block("run", "Ranks and SGLang in one pod", "yaml").text
    for old, new in {"name: ranks": f"name: {name}", **changes}.items():
        assert old in text, old
        text = text.replace(old, new)
    shell.run(f"kubectl apply --namespace team-a -f - <<'MANIFEST'\n{text}\nMANIFEST")


def is_rank(process: psutil.Process) -> bool:
    """Whether a pod is a rank's, by its user."""
    return process.info["uids"].real == 65532 and "RankActor" in " ".join(process.cmdline())


def has_ended(status: Object) -> bool:
    return status.get("phase") in ("Succeeded", "Failed")


def read(folder: Path) -> tuple[Object, list[Object], Object]:
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    (preflight,) = (folder / "parity").iterdir()
    return report, rows, json.loads(preflight.read_text(encoding="utf-8"))


def test_the_pod_completes_at_its_first_attempt(both: Both) -> None:
    assert (both.status["phase"], both.status["step"], both.status["attempt"]) == ("Succeeded", 4, 1), both.status
    (container,) = both.seen["spec"]["containers"]
    security = container["securityContext"]
    assert (security["readOnlyRootFilesystem"], security["capabilities"]) == (True, {"drop": ["ALL"]})
    assert both.seen["spec"]["securityContext"]["runAsUser"] == 65532


def test_its_adapter_and_proofs_are_in_the_bucket(both: Both) -> None:
    assert (both.pod / "adapters/policy-v4/adapter_model.safetensors").is_file()
    report, rows, _ = read(both.pod)
    assert report["publishes"] == report["publishes_proven"] == 5
    assert report["base_digest_before"] == report["base_digest_after"]
    assert all(row["parity_mean"] <= row["parity_limit"] for row in rows)


def test_the_unchanged_manifest_gives_the_same_parity_report_on_a_laptop(both: Both) -> None:
    """SGLang draws tokens by its own random numbers and in batches as they come: rollouts and last bits differ."""
    (there, rows, preflight), (here, own_rows, own_preflight) = read(both.pod), read(both.laptop)
    for name in ("base_digest_before", "publishes_proven", "trainable_parameters", "versions", "warnings", "failures"):
        assert there[name] == here[name], name
    assert judged(preflight) == judged(own_preflight)
    assert judged(preflight)["passed"]
    for found in (preflight, own_preflight):
        assert all(found[stage]["max"] <= LARGEST for stage in STAGES)
        assert found["random_effect"] == pytest.approx(0.0898144, rel=1e-5), "what an adapter that nobody trained moves"
    for each in (*rows, *own_rows):
        assert (each["parity_limit"], each["parity_top1"], each["parity_outside"]) == (1e-4, 1.0, 0.0)
        assert each["parity_max"] <= LARGEST
    print_both(both)


def judged(preflight: Object) -> Object:
    """What was asked and found, without what the last bits decide."""
    stages = {name: {key: preflight[name][key] for key in ("tokens", "top1", "outside")} for name in STAGES}
    return {**stages, **{key: preflight[key] for key in ("limit", "limits", "passed", "failures", "engine")}}


def print_both(both: Both) -> None:
    """The table of the guide."""
    for name, folder in (("laptop", both.laptop), ("pod", both.pod)):
        report, rows, preflight = read(folder)
        print(name, {key: preflight[key]["mean"] for key in STAGES}, preflight["limit"], preflight["passed"])
        print(name, [row["parity_mean"] for row in rows], report["parity"], report["publishes_proven"])


def test_a_rank_that_is_killed_is_named_in_the_status_and_the_next_pod_goes_on(both: Both, faults: Faults) -> None:
    first = faults.killed["attempts"][0]["ending"]
    assert (first["reason"], first["exitCode"]) == ("CollectiveFailed", 81)
    assert re.search(r"\brank [01]\b", faults.last_words), faults.last_words
    assert "SIGKILL" in faults.last_words or "killed" in faults.last_words
    assert faults.killed["attempt"] == 2


def test_a_pod_that_is_asked_to_stop_keeps_its_step_within_its_grace_period(both: Both, faults: Faults) -> None:
    ending = faults.suspended["attempts"][1]["ending"]
    assert (ending["exitCode"], ending["reason"]) == (75, "Checkpointed")
    assert faults.suspended["checkpoint"]["step"] >= 3


def test_shared_memory_too_small_for_ranks_is_said_before_they_start(both: Both, faults: Faults) -> None:
    ending = faults.small["attempts"][0]["ending"]
    assert (ending["exitCode"], ending["reason"]) == (79, "OutOfMemory")
    assert "/dev/shm has" in faults.small["message"]


@pytest.mark.parametrize(("name", "containers"), [("lora", 1), ("split", 2)])
def test_lora_and_a_container_of_the_engines_own_are_proven_too(
    name: str, containers: int, others: dict[str, tuple[Object, Object]], cluster: Cluster
) -> None:
    status, pod = others[name]
    assert (status["phase"], status["step"], status["attempt"]) == ("Succeeded", 4, 1), status
    running = [each["name"] for each in pod["spec"]["containers"] + pod["spec"].get("initContainers", [])]
    assert len(running) >= containers, running
    report, rows, preflight = read(cluster.buckets / "orbit-runs/team-a" / name)
    assert report["publishes"] == report["publishes_proven"] == 5
    assert preflight["passed"]
    assert all(row["parity_max"] <= LARGEST for row in rows)
