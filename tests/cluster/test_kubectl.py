"""What a person with `kubectl` sees of an OrbitRun: refusals, columns, an object that is a manifest again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster.bed.control_plane import ControlPlane
from cluster.bed.programs import find_program

from orbit_runtime.spec import load_manifest
from tests.cluster.corpus import ANY, EXAMPLES, NO_YAML, Case, hand_written, manifest
from tests.cluster.crd_api import RunsApi

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
SAMPLE = [
    case for case in hand_written() if case.by_server != ANY and case.why != NO_YAML and len(case.text) < 100_000
][::9]
"""Every ninth of the corpus: `kubectl` starts a process for each. What is no YAML to the server is left out, since
`kubectl` reads YAML by itself and sends JSON."""


@pytest.fixture
def kubectl(control_plane: ControlPlane, runs_api: RunsApi) -> Kubectl:
    """Runs it as an administrator, on a control plane that knows OrbitRuns."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [find_program("kubectl"), "--kubeconfig", str(control_plane.kubeconfig), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_kubectl_names_the_fields_that_the_server_names(case: Case, kubectl: Kubectl, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(case.text, encoding="utf-8")
    done = kubectl("create", "--dry-run=server", "--validate=strict", "-f", str(file))
    assert (done.returncode == 0) == (not case.by_server), done.stderr
    assert [field for field in case.by_server if field not in done.stderr] == []


def test_kubectl_keeps_the_later_of_a_key_twice_as_the_guide_says(kubectl: Kubectl, tmp_path: Path) -> None:
    """Neither the server nor a rule can see it; `orbit validate` refuses it."""
    file = tmp_path / "run.yaml"
    file.write_text(manifest(training="{steps: 5, steps: 6}"), encoding="utf-8")
    printed = ("-o", "jsonpath={.spec.training.steps}")
    done = kubectl("create", "--dry-run=server", "--validate=strict", *printed, "-f", str(file))
    assert (done.returncode, done.stdout) == (0, "6"), done.stderr


def test_the_quickstart_is_created_and_printed(kubectl: Kubectl, runs_api: RunsApi, tmp_path: Path) -> None:
    (quickstart,) = [path for path in EXAMPLES if path.stem == "quickstart"]
    assert kubectl("apply", "-f", str(quickstart)).stdout == "orbitrun.orbitrl.dev/quickstart created\n"
    status = {"phase": "Running", "reason": "Training", "step": 7, "reward": 0.5, "attempt": 1}
    assert runs_api.apply_status("quickstart", status).code == 200
    head, row = kubectl("get", "orun").stdout.splitlines()
    assert head.split() == ["NAME", "PHASE", "REASON", "STEP", "REWARD", "ATTEMPT", "AGE"]
    assert row.split()[:-1] == ["quickstart", "Running", "Training", "7", "0.5", "1"]
    wide = kubectl("get", "orun", "-o", "wide").stdout.split("\n")[0].split()
    assert wide[7:] == ["MODEL", "PRECISION", "ADAPTER", "QUEUE", "NODE", "CHECKPOINT"]
    assert "quickstart" in kubectl("get", "orbit").stdout


def test_what_kubectl_prints_of_a_run_is_the_same_run(kubectl: Kubectl, runs_api: RunsApi, tmp_path: Path) -> None:
    (quickstart,) = [path for path in EXAMPLES if path.stem == "quickstart"]
    assert kubectl("apply", "-f", str(quickstart)).returncode == 0
    assert runs_api.apply_status("quickstart", {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}).code == 200
    printed = tmp_path / "printed.yaml"
    printed.write_text(kubectl("get", "orun", "quickstart", "-o", "yaml", "--show-managed-fields").stdout)
    assert "startTime" in printed.read_text()
    assert "managedFields" in printed.read_text()
    assert load_manifest(printed, environ={}).spec == load_manifest(quickstart, environ={}).spec


def test_a_changed_run_is_refused_with_what_to_do(kubectl: Kubectl) -> None:
    (quickstart,) = [path for path in EXAMPLES if path.stem == "quickstart"]
    assert kubectl("apply", "-f", str(quickstart)).returncode == 0
    longer = kubectl("patch", "orun", "quickstart", "--type=merge", "-p", '{"spec": {"training": {"steps": 99}}}')
    assert longer.returncode == 1
    assert "spec.training: Invalid value" in longer.stderr
    assert "cannot change once the run exists: start a new run" in longer.stderr
    suspended = kubectl(
        "patch", "orun", "quickstart", "--type=merge", "-p", '{"spec": {"lifecycle": {"suspend": true}}}'
    )
    assert suspended.returncode == 0, suspended.stderr


def test_kubectl_explains_every_field_that_is_asked_for(kubectl: Kubectl) -> None:
    told = kubectl("explain", "orun.spec.placement.gpuProduct").stdout
    assert "nvidia.com/gpu.product" in told
    assert "whoActs" in kubectl("explain", "orun.status").stdout


def test_a_run_without_its_own_name_is_refused(kubectl: Kubectl, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(manifest(metadata="{generateName: sweep-}"))
    done = kubectl("create", "-f", str(file))
    assert done.returncode == 1
    assert "write name instead: the run folder is called like it" in done.stderr
