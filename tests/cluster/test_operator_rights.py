"""Rights that the operator does not have in one of its namespaces: the others go on, and nothing is done twice.

The operator is a process with a service account's token. API server and authoriser are real; pods are moved by hand.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from cluster.bed.control_plane import ControlPlane
from cluster.by_hand import Object, Server, Team, connect, open_team, wait_for
from cluster.operator_process import Operator, run_operator
from cluster.wire import Wire, open_wire
from fakes.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
RBAC = "/apis/rbac.authorization.k8s.io/v1"
ACCOUNT = "rights"


@pytest.fixture(scope="module")
def server(control_plane: ControlPlane) -> Server:
    return connect(control_plane.kubeconfig)


def allow(server: Server, namespace: str, subjects_in: str, *, without: str = "") -> None:
    """The operator may do in this namespace all that it does, `without` one kind of object."""
    groups = {
        "orbitrl.dev": ["orbitruns", "orbitruns/status", "orbitruns/finalizers"], "batch": ["jobs"],
        "": ["pods", "configmaps", "events"], "coordination.k8s.io": ["leases"],
        "networking.k8s.io": ["networkpolicies"],
    }  # fmt: skip
    rules = [
        {"apiGroups": [group], "resources": [each for each in kinds if each != without], "verbs": ["*"]}
        for group, kinds in groups.items()
    ]
    role: Object = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": ACCOUNT}}
    server.apply(
        f"{RBAC}/namespaces/{namespace}/roles/{ACCOUNT}", {**role, "rules": [r for r in rules if r["resources"]]}
    )
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT}
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": subjects_in}
    binding = {**role, "kind": "RoleBinding", "roleRef": reference, "subjects": [subject]}
    server.apply(f"{RBAC}/namespaces/{namespace}/rolebindings/{ACCOUNT}", binding)


def forbid(server: Server, namespace: str) -> None:
    server.delete(f"{RBAC}/namespaces/{namespace}/rolebindings/{ACCOUNT}")


@contextmanager
def two_namespaces(server: Server, folder: Path) -> Iterator[tuple[Team, Team, Wire, dict[str, str]]]:
    """Two namespaces, the way to the API server, and the settings of an operator that may only what `allow` says."""
    config = folder / "kubeconfig"
    with (
        open_team(server, "near") as near,
        open_team(server, "far") as far,
        open_wire(server.kubeconfig, config) as wire,
    ):
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}}
        path = f"/api/v1/namespaces/{near.namespace}/serviceaccounts"
        server.create(path, account)
        token = server.create(f"{path}/{ACCOUNT}/token", {"spec": {"expirationSeconds": 3600}})["status"]["token"]
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
        content["users"][0]["user"] = {"token": token}
        config.write_text(yaml.safe_dump(content), encoding="utf-8")
        yield (
            near,
            far,
            wire,
            {
                "KUBECONFIG": str(config),
                "ORBIT_OPERATOR_NAMESPACES": f"{near.namespace},{far.namespace}",
                "ORBIT_OPERATOR_HEALTH_PORT": str(free_port()),
                "ORBIT_OPERATOR_METRICS_PORT": str(free_port()),
                "ORBIT_OPERATOR_LEASE_SECONDS": "60",
            },
        )


def ask(settings: dict[str, str], port: str, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{settings[f'ORBIT_OPERATOR_{port}_PORT']}{path}", trust_env=False)


def is_told(operator: Operator, settings: dict[str, str], namespace: str) -> bool:
    try:
        told = ask(settings, "METRICS", "/metrics").text
    except httpx.HTTPError:
        return False
    known = f'orbit_operator_namespace_refused{{watched="{namespace}"}} 1.0' in told
    return known and f"namespace {namespace} cannot be read" in operator.text


def test_a_namespace_that_may_not_be_read_keeps_no_other_waiting(server: Server, tmp_path: Path) -> None:
    with two_namespaces(server, tmp_path) as (near, far, wire, settings):
        allow(server, near.namespace, near.namespace)
        with run_operator(near, tmp_path / "operator.log", **settings) as operator:
            far.start_run("adder")
            near.start_run("adder")
            near.wait_phase("adder", "Starting")
            wait_for(lambda: is_told(operator, settings, far.namespace), "log and metrics name the namespace")
            ready = ask(settings, "HEALTH", "/readyz")
            assert (ready.status_code, ready.json()["note"]) == (200, f"may not read {far.namespace}")
            assert (far.jobs(), far.status("adder")) == ([], {})

            allow(server, far.namespace, near.namespace)
            far.wait_phase("adder", "Starting", seconds=60)
            assert "namespace_refused{" not in ask(settings, "METRICS", "/metrics").text
            assert ask(settings, "HEALTH", "/readyz").json()["note"] is None

            # Taken away while it runs: watches that are there go on until they end.
            forbid(server, far.namespace)
            wire.drop()
            wait_for(lambda: is_told(operator, settings, far.namespace), "the loss is told")
            near.start_run("other")
            near.wait_phase("other", "Starting")
            far.exits = {1: 0}
            ended = far.path("jobs", "adder-a1")
            wait_for(lambda: (server.get(ended) or {}).get("status", {}).get("succeeded"), "it ends unseen")
            assert far.status("adder")["phase"] == "Starting"
            allow(server, far.namespace, near.namespace)
            far.wait_phase("adder", "Succeeded", seconds=60)
            assert far.jobs() == ["adder-a1"]
            assert operator.process.poll() is None


def test_a_run_whose_jobs_may_not_be_read_gets_no_second_pod(server: Server, tmp_path: Path) -> None:
    """Runs are listed, their Jobs are not: to an operator that has just started they look as if they had none."""
    with two_namespaces(server, tmp_path) as (near, far, _, settings):
        for team in (near, far):
            allow(server, team.namespace, near.namespace)
        with run_operator(near, tmp_path / "first.log", **settings) as operator:
            far.start_run("adder")
            far.wait_phase("adder", "Starting")
            assert operator.stop() == 0
        allow(server, far.namespace, near.namespace, without="jobs")
        with run_operator(near, tmp_path / "second.log", **settings) as operator:
            near.start_run("adder")
            near.wait_phase("adder", "Starting")
            wait_for(lambda: is_told(operator, settings, far.namespace), "the loss is told")
            far.start_run("other")
            server.merge(far.path("orbitruns", "adder"), {"metadata": {"annotations": {"touched": "yes"}}})
            time.sleep(1.0)
            assert far.jobs() == ["adder-a1"]
            assert far.status("adder")["attempt"] == 1
            allow(server, far.namespace, near.namespace)
            far.wait_phase("other", "Starting", seconds=60)
            assert (far.jobs(), far.status("adder")["attempt"]) == (["adder-a1", "other-a1"], 1)
            assert {len(names) for names in far.history} <= {0, 1, 2}
