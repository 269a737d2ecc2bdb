"""The product as a whole, as its guides tell it: from `helm install` over an adapter in the bucket to `kubectl delete`.

Everything is real but the GPUs: the chart by Helm 4 and 3, the operator in a pod with its own account, images from the
Dockerfile, the shipped model, an S3 server, Prometheus. Tests are in the order in which a person would do these things,
and later ones count on earlier ones. `test_uninstall.py` is the end.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from cluster.bed.cluster import Cluster, wait_for
from cluster.bed.images import REGISTRY, TARGETS
from cluster.captures import check_capture
from cluster.real_node import container_of
from cluster.scraping import Prometheus, install_monitoring_crds, read_panels, run_prometheus
from cluster.shell import ROOT, Shell
from cluster.watching import find_pods, holds, wait_status, watch_status

from orbit_runtime import __version__
from tools.chart.dashboards import RUN

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
Object = dict[str, Any]
NEXT_VERSION = "0.1.1-next"
HALVES = {
    "rollout: {": "rollout: {engine: SGLang, ", "gpus: 8": "gpus: 2\n    layout: Split",
    "  placement:": "  lifecycle: {maxInfraRestarts: 0}\n  placement:",
}  # fmt: skip
"""Changes of the guide's manifest for a run with a container for its engine, that is tried once."""
WITHOUT_DATA = {
    "Orbit: one run: Dropped tokens": "the quickstart has no importance sampling",
    "Orbit: one run: Bound of OFT's series": "the quickstart trains LoRA",
    "Orbit: one run: Parts of the reward": "the quickstart has one reward",
    "Orbit: one run: Evaluation of held-out prompts": "the quickstart evaluates nothing",
    "Orbit: one run: Sources of prompts": "the quickstart's source has no weight",
    "Orbit: one run: Difficulty of prompts": "the quickstart passes over no prompt",
    "Orbit: one run: KL from the base": "the quickstart has no KL term, which is one of its two lines",
    "Orbit: one run: Critic": "the quickstart has no critic",
    "Orbit: one run: Held-out demonstrations": "the quickstart learns from rewards",
    "Orbit: one run: Teacher": "the quickstart has no teacher",
    "Orbit: one run: Routers that agree": "the quickstart's model has no routed experts",
    **dict.fromkeys(
        (f"Orbit: one run: {panel.title}" for panel in RUN.rows["Engine"]),
        "the torch engine has no server; tests/engines asks a real one",
    ),
}
"""Panels that stay empty for the guide's run, and why."""


@dataclass(frozen=True)
class Story:
    """What was seen of the guide's run."""

    seen: list[Object]
    pod: Object
    """While it ran."""
    operators: tuple[str, str]
    """Names of the operator's pod before and after the upgrade."""


@pytest.fixture(scope="module")
def prometheus(release: Shell, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    install_monitoring_crds(cluster, tmp_path_factory.mktemp("module"))
    release.follow("install", "Monitoring")
    with run_prometheus(cluster) as running:
        yield running


@pytest.fixture(scope="module")
def quickstart(release: Shell, cluster: Cluster, prometheus: Prometheus) -> Story:
    """The run of the guide, from its manifest to its end. The release is upgraded while it trains."""
    make_next_version(release, cluster)
    (cluster.buckets / "orbit-runs").mkdir(exist_ok=True)
    release.follow("run", "Credentials")
    assert "run.yaml is valid" in release.follow("run", "The manifest")
    before = operator_pod(cluster)
    with watch_status(cluster, "quickstart") as seen, release.meanwhile("run", "Start, watch, wait"):
        wait_status(cluster, "quickstart", lambda status: status.get("step", 0) >= 2, "trains")
        (pod,) = find_pods(cluster, "quickstart")
        release.follow("upgrade", "Upgrade")
    return Story(seen, pod, (before, operator_pod(cluster)))


def operator_pod(cluster: Cluster) -> str:
    pods = cluster.get("pods", "-n", "orbit-system", "-l", "app.kubernetes.io/component=operator")["items"]
    (alive,) = [pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    return str(alive)


def make_next_version(shell: Shell, cluster: Cluster) -> None:
    """The checkout of a later version, with images of that name in the registry."""
    (shell.folder / "charts").unlink()
    shutil.copytree(ROOT / "charts", shell.folder / "charts")
    file = shell.folder / "charts/orbit/Chart.yaml"
    file.write_text(re.sub(r"(?m)^(version|appVersion): .*$", rf"\1: {NEXT_VERSION}", file.read_text()))
    for node in filter(lambda node: node.has_gpus, cluster.nodes):
        for image in TARGETS:
            name = f"{REGISTRY}/orbit-{image}"
            node.ctr("images", "tag", "--force", f"{name}:{__version__}", f"{name}:{NEXT_VERSION}")


def start_run(shell: Shell, name: str, changes: dict[str, str]) -> None:
    """The guide's manifest under another name."""
    changes = {"name: quickstart": f"name: {name}", **changes}
    shell.write_files("run", "The manifest", changes)
    shell.run("kubectl apply --namespace team-a -f run.yaml")


def test_helm_test_agrees(release: Shell) -> None:
    printed = release.follow("install", "Check the installation")
    for check in ("check_crd", "check_rights", "check_metrics", "check_dry_run"):
        assert f"ok: {check}" in printed


def test_the_operators_pod_would_be_admitted_where_pods_are_restricted(release: Shell, cluster: Cluster) -> None:
    level = "pod-security.kubernetes.io/enforce=restricted"
    assert "Warning" not in release.run(f"kubectl label --dry-run=server namespace orbit-system {level}")
    pod = cluster.get("pod", "-n", "orbit-system", operator_pod(cluster))
    assert pod["spec"]["serviceAccountName"] == "orbit-operator"
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


def test_what_the_security_guide_asks_the_api_server_is_so(release: Shell) -> None:
    release.follow("security", "What the operator may do")
    release.follow("security", "What users may do")
    release.follow("security", "What a run is")


def test_a_run_goes_by_itself_from_its_pod_to_its_end(quickstart: Story) -> None:
    pod = quickstart.pod
    assert pod["status"]["phase"] == "Running"
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert pod["spec"]["containers"][0]["image"] == f"{REGISTRY}/orbit-runtime:{__version__}"
    phases = list(dict.fromkeys(status["phase"] for status in quickstart.seen))
    assert phases[-1] == "Succeeded"
    assert set(phases) <= {"Pending", "Starting", "Running", "Stopping", "Succeeded"}
    steps = [status.get("step", 0) for status in quickstart.seen]
    assert steps == sorted(steps)
    assert len(set(steps)) >= 4, steps
    last = quickstart.seen[-1]
    assert (last["step"], last["steps"], last["policyVersion"], last["checkpoint"]["step"]) == (60, 60, 60, 60)
    assert last["parity"]["value"] <= last["parity"]["limit"]
    assert holds(last, "Complete")
    assert last["gpuSeconds"]["useful"] > 0


def test_a_run_that_is_alive_survives_an_upgrade(quickstart: Story, release: Shell, cluster: Cluster) -> None:
    assert quickstart.operators[0] != quickstart.operators[1]
    (attempt,) = quickstart.seen[-1]["attempts"]
    assert attempt["podUID"] == quickstart.pod["metadata"]["uid"]
    newest = cluster.get("pod", "-n", "orbit-system", quickstart.operators[1])
    assert newest["spec"]["containers"][0]["image"] == f"{REGISTRY}/orbit-operator:{NEXT_VERSION}"


def test_adapter_and_report_are_in_the_bucket(quickstart: Story, release: Shell, cluster: Cluster) -> None:
    folder = cluster.buckets / "orbit-runs/team-a/quickstart"
    for name in ("adapters/policy-v60/adapter_model.safetensors", "adapters/policy-v60/manifest.json", "report.html"):
        assert (folder / name).is_file(), name
    listed = release.follow("run", "The result")
    assert re.search(r"^quickstart +60/60 .* done ", listed, re.MULTILINE), listed
    release.say("run", "kubectl logs --namespace team-a -l orbitrl.dev/run-name=quickstart")


def test_the_operations_guide_shows_a_success_as_it_is_printed(quickstart: Story, release: Shell) -> None:
    check_capture(release, "success", "quickstart")


def test_prometheus_finds_the_operator_and_the_run_by_the_charts_monitors(
    quickstart: Story, prometheus: Prometheus
) -> None:
    targets = prometheus.targets()
    (operator,) = targets["serviceMonitor/orbit-system/orbit-operator/0"]
    assert (operator["health"], operator["lastError"]) == ("up", "")
    steps = prometheus.series('orbit_run_step{namespace="team-a", run="quickstart"}')
    assert {each["metric"]["attempt"] for each in steps} == {"1"}
    assert {each["metric"]["pod"] for each in steps} == {quickstart.pod["metadata"]["name"]}
    assert not [name for each in steps for name in each["metric"] if name.startswith("exported_")]
    ended = 'orbit_run_phase{run="quickstart", phase="Succeeded"}'
    (phase,) = wait_for(lambda: prometheus.series(ended), "the end is scraped", 10)
    assert phase["metric"]["namespace"] == "team-a"


def list_empty(prometheus: Prometheus, panels: list[tuple[str, str]]) -> set[str]:
    return {name for name, query in panels if not prometheus.series(query)}


def test_every_panel_of_both_dashboards_has_data_after_a_run(
    quickstart: Story, prometheus: Prometheus, cluster: Cluster
) -> None:
    variables = {"namespace": "team-a", "run": "quickstart", "__rate_interval": "10s"}
    panels = read_panels(cluster, variables)
    assert len(panels) > 40
    with contextlib.suppress(AssertionError):
        wait_for(lambda: list_empty(prometheus, panels) == set(WITHOUT_DATA), "the last values are scraped", 10)
    assert list_empty(prometheus, panels) == set(WITHOUT_DATA)


def test_every_alert_is_evaluated_and_none_fires_for_a_good_run(quickstart: Story, prometheus: Prometheus) -> None:
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len([rule for rule in rules if rule["type"] == "alerting"]) == 14
    assert [rule["lastError"] for rule in rules if rule["health"] != "ok"] == []
    assert [alert["labels"] for alert in prometheus.ask("alerts")["alerts"] if alert["state"] == "firing"] == []


def test_a_mistake_is_the_users_at_the_first_try(
    quickstart: Story, release: Shell, cluster: Cluster, begin: Callable[[str], None]
) -> None:
    begin("fault_stories")
    wrong = "--from-literal=AWS_ACCESS_KEY_ID=orbit-test --from-literal=AWS_SECRET_ACCESS_KEY=not-the-one"
    place = '--from-literal=AWS_ENDPOINT_URL="$AWS_ENDPOINT_URL"'
    release.run(f"kubectl create secret generic wrong --namespace team-a {wrong} {place}")
    start_run(release, "denied", {"orbit-store": "wrong"})
    # Its end is the next test's.
    start_run(release, "halves", HALVES)
    status = wait_status(cluster, "denied", lambda status: holds(status, "Failed"), "has failed")
    assert (status["reason"], status["whoActs"], status["attempt"]) == ("CredentialsInvalid", "User", 1)
    assert status["attempts"][0]["ending"]["exitCode"] == 77
    assert "s3://orbit-runs" in status["message"]
    assert "check AWS_ACCESS_KEY_ID" in status["message"], "the status says what to do"
    check_capture(release, "user-error", "denied")


def test_in_a_split_pod_the_run_asks_the_engines_container_for_its_server(
    quickstart: Story, release: Shell, cluster: Cluster
) -> None:
    """No image here has SGLang, which `tests/engines/test_agent.py` starts so: all else is as on GPUs."""
    status = wait_status(cluster, "halves", lambda status: holds(status, "Failed"), "has failed")
    (attempt,) = status["attempts"]
    assert (attempt["ending"]["reason"], attempt["ending"]["exitCode"]) == ("Unsupported", 78)
    assert "SGLang is not installed for" in status["message"]
    (pod,) = find_pods(cluster, "halves")
    (engine,) = pod["status"]["initContainerStatuses"]
    assert (engine["name"], engine["restartCount"], engine["state"]["terminated"]["exitCode"]) == ("engine", 0, 0)
    gpus = [
        each["resources"]["limits"]["nvidia.com/gpu"]
        for key in ("containers", "initContainers")
        for each in pod["spec"][key]
    ]
    assert gpus == ["1", "1"]
    release.run("kubectl delete orun halves --namespace team-a --wait=true --timeout=2m")


def test_a_lost_node_is_left_and_a_run_that_says_so_takes_its_artifacts_with_it(
    quickstart: Story, release: Shell, cluster: Cluster
) -> None:
    changes = {"steps: 60": "steps: 400", "orbit-store\n": "orbit-store\n    deletionPolicy: Delete\n"}
    start_run(release, "stranded", changes)
    status = wait_status(
        cluster, "stranded", lambda status: status.get("checkpoint", {}).get("step"), "has a checkpoint of a step"
    )
    (lost,) = [node for node in cluster.nodes if node.name == status["node"]]
    (pod,) = find_pods(cluster, "stranded")
    # Else it would train on, on the cores that all others share. That it is fenced then: `test_node_real_runs`.
    lost.ctr("tasks", "pause", container_of(pod))
    lost.freeze()
    try:
        status = wait_status(
            cluster,
            "stranded",
            lambda status: status["attempt"] == 2 and "checkpoint" in status["attempts"][1],
            "goes on",
            300,
        )
        assert status["node"] != lost.name
        ending = status["attempts"][0]["ending"]
        assert (ending["reason"], ending["whoActs"]) == ("NodeLost", "Cluster")
        check_capture(release, "node-loss", "stranded")
        assert (cluster.buckets / "orbit-runs/team-a/stranded/run.json").is_file()
    finally:
        lost.ctr("tasks", "resume", container_of(pod))
        lost.thaw()
    wait_for(lambda: cluster.is_ready(lost), f"{lost.name} is Ready again")
    release.run("kubectl delete orun stranded --namespace team-a --wait=true --timeout=3m")
    assert not list((cluster.buckets / "orbit-runs/team-a").glob("stranded/**/*.json"))
    assert (cluster.buckets / "orbit-runs/team-a/quickstart/run.json").is_file(), "and nothing else"


def test_suspend_resume_and_drain_cost_no_retry(quickstart: Story, release: Shell, cluster: Cluster) -> None:
    release.write_files("run", "The manifest", {"steps: 60": "steps: 12"})
    with watch_status(cluster, "pausing") as seen:
        release.follow("run", "Suspend, resume, repeat", 0)
        check_capture(release, "suspend", "pausing")
        now = wait_status(cluster, "pausing", lambda status: holds(status, "Suspended"), "is suspended")
        (first,) = now["attempts"]
        with release.meanwhile("run", "Suspend, resume, repeat", 1):
            running = wait_status(
                cluster, "pausing", lambda status: status["attempt"] == 2 and status["phase"] == "Running", "goes on"
            )
            left = running["node"]
            release.say("operations", "kubectl drain NODE --ignore-daemonsets --delete-emptydir-data", NODE=left)
            release.say("operations", "kubectl uncordon NODE", NODE=left)
    last = seen[-1]
    assert last["phase"] == "Succeeded"
    assert [each["ending"]["result"] for each in last["attempts"]] == ["Stopped", "Stopped", "Succeeded"]
    assert (last["freeRestarts"], last["infraRestarts"], last["userRetries"]) == (2, 0, 0)
    assert last["attempts"][2]["node"] != running["node"]
    assert first["ending"]["exitCode"] == 75
    steps = [status.get("step", 0) for status in seen]
    assert steps == sorted(steps), "no step is lost"


@pytest.mark.usefixtures("real_story_ahead")
def test_the_commands_of_the_operations_guide(quickstart: Story, release: Shell, cluster: Cluster) -> None:
    printed = release.follow("operations", "Look at runs")
    assert "CredentialsInvalid" in printed
    # Without a pod: the GPUs are the real runs'.
    start_run(release, "alone", {"spec:\n": "spec:\n  lifecycle: {suspend: true}\n"})
    release.say(
        "operations", "kubectl annotate orun NAME --namespace team-a orbitrl.dev/reconcile=disabled", NAME="alone"
    )
    release.say("operations", "kubectl annotate orun NAME --namespace team-a orbitrl.dev/reconcile-", NAME="alone")
    release.follow("operations", "Pause a run or the operator")
    release.say("operations", "orbit doctor --store URI", URI="s3://orbit-runs/doctor")
    release.run("kubectl delete orun alone denied --namespace team-a --wait=true --timeout=3m")


def test_a_deleted_run_takes_everything_along_but_its_folder(
    quickstart: Story, release: Shell, cluster: Cluster
) -> None:
    release.follow("run", "Delete")
    selector = "app.kubernetes.io/managed-by=orbit-operator"
    for kind in ("jobs", "pods", "networkpolicies"):
        wait_for(lambda kind=kind: not cluster.get(kind, "-n", "team-a", "-l", selector)["items"], f"no {kind}")  # type: ignore[misc]
    assert (cluster.buckets / "orbit-runs/team-a/quickstart/report.html").is_file()


def test_a_namespaces_owner_installs_with_helm_3_and_removes_everything(release: Shell, cluster: Cluster) -> None:
    release.use_helm("helm3")
    try:
        release.follow("install", "With limited rights")
        rights = cluster.get("clusterroles", "-l", "app.kubernetes.io/managed-by=Helm")["items"]
        owners = {role["metadata"]["annotations"]["meta.helm.sh/release-namespace"] for role in rights}
        assert owners == {"orbit-system"}, "the little one has none"
        release.follow("install", "Remove")
    finally:
        release.use_helm("helm4")


def test_the_crd_is_upgraded_apart_and_a_release_goes_back(quickstart: Story, release: Shell) -> None:
    release.follow("upgrade", "The CRD")
    release.follow("upgrade", "Roll back")
    assert __version__ in release.run("kubectl get deployment orbit-operator --namespace orbit-system -o wide")
