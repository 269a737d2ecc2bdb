"""The CRD on a real API server: defaults, what may change, the status, and what `kubectl get` prints."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from orbit_runtime.spec import OrbitRun, parse_manifest
from orbit_runtime.spec.crd import CHECKS, NAME_RULES, build_crd
from orbit_runtime.spec.fields import all_fields, is_block, status_tree
from orbit_runtime.spec.status import MAX_ATTEMPTS
from tests.cluster.corpus import hand_written, manifest
from tests.cluster.crd_api import CRDS, RunsApi
from tests.cluster.field_cases import field_cases

TIME = "2026-01-01T00:00:00Z"
CONDITION = {"type": "Progressing", "status": "True", "reason": "Running", "message": "", "lastTransitionTime": TIME}


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Path → value of everything that is no mapping or list; an empty one counts as a value."""
    items = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    if not items:
        return {path: value}
    found: dict[str, Any] = {}
    for key, child in items:
        found |= leaves(child, f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}".lstrip("."))
    return found


def test_the_server_accepts_the_crd_and_hands_it_out_unchanged(runs_api: RunsApi) -> None:
    served = runs_api.client.get(f"{CRDS}/orbitruns.orbitrl.dev").json()
    state = {each["type"]: each["status"] for each in served["status"]["conditions"]}
    assert state == {"NamesAccepted": "True", "Established": "True"}, served["status"]["conditions"]
    assert [each["schema"] for each in served["spec"]["versions"]] == [
        each["schema"] for each in build_crd()["spec"]["versions"]
    ]


def test_defaults_of_the_server_are_those_of_the_models(runs_api: RunsApi) -> None:
    text = manifest()
    assert runs_api.create(text).code == 201
    stored = runs_api.get("corpus")
    by_model = leaves(parse_manifest(text, name="x", environ={}).to_manifest()["spec"])
    by_server = leaves(stored["spec"])
    # What depends on another field, and a mapping that is empty either way, have no default in a CRD.
    assert "adapter.lora.rank" in by_model
    by_model = {path: value for path, value in by_model.items() if not path.startswith("adapter.lora.")}
    assert {path: value for path, value in by_model.items() if value != {}} == {
        path: value for path, value in by_server.items() if value != {}
    }
    assert OrbitRun.model_validate(stored).spec == parse_manifest(text, name="x", environ={}).spec


def test_what_kubectl_prints_of_a_stored_run_is_a_manifest(runs_api: RunsApi) -> None:
    assert runs_api.create(manifest(lifecycle="{suspend: true}")).code == 201
    assert runs_api.apply_status("corpus", {"phase": "Suspended", "conditions": [CONDITION]}).code == 200
    stored = runs_api.get("corpus")
    assert {"uid", "resourceVersion", "generation", "managedFields", "creationTimestamp"} <= set(stored["metadata"])
    assert "status" in stored
    assert OrbitRun.model_validate(stored, by_name=False).spec.lifecycle.suspend


def change(whole: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at `spec.<path>`; None takes the field out."""
    changed = copy.deepcopy(whole)
    here: Any = changed["spec"]
    *parts, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parts:
        here = here.setdefault(part, {}) if isinstance(part, str) else here[part]
    if value is None:
        del here[last]
    else:
        here[last] = value
    return changed


FIXED_CHANGES = (
    ("model.uri", "other"), ("model.precision", "BF16"), ("adapter.type", "LoRA"), ("adapter.lora", {}),
    ("adapter.oft", None), ("adapter.targets.0", "other"), ("adapter.targets", ["q_proj"]),
    ("algorithm.clip.high", 0.5),
    ("data.prompts.0.uri", "other"), ("data.seed", 1), ("data.limit", 7), ("environment.rewards.0.arguments", {"b": 1}),
    ("environment.rewards.0.arguments.a", 2), ("environment.rewards.0.arguments", None),
    ("environment.rewards.0.arguments.deep.x", 1), ("environment.code", {"uri": "s3://b/c"}),
    ("rollout.sampling.stop", ["x"]), ("training.steps", 6), ("training.schedule.warmupSteps", 1),
    ("parity.meanLimit", 0.5), ("evaluation.samples", 4), ("checkpoint.keep", 9), ("storage.uri", "s3://other"),
    ("storage.credentialsSecretName", "other"), ("storage.deletionPolicy", "Delete"), ("placement.gpus", 4),
    ("placement.resources.memory", "1Gi"), ("placement.nodeSelector", {"b": "x"}), ("placement.nodeSelector.a", "y"),
    ("placement.egress", [{"namespace": "a"}]), ("observability.logLevel", "Debug"),
    ("observability.logFormat", "JSON"),
    ("lifecycle.managedBy", "a.b/c"), ("lifecycle.activeDeadlineSeconds", 9), ("lifecycle.activeDeadlineSeconds", None),
    ("lifecycle.startupDeadlineSeconds", 9), ("lifecycle.terminationGracePeriodSeconds", 9),
    ("lifecycle.waitingDeadlineSeconds", 9), ("placement.pod", {"schedulerName": "other"}),
    ("lifecycle.maxUserRetries", 9), ("lifecycle.maxInfraRestarts", 9), ("lifecycle.queueName", "other"),
    ("lifecycle.queueName", None),
)  # fmt: skip
RUNNING = manifest(
    adapter="{type: OFT, oft: {}, targets: [q_proj, v_proj]}",
    environment="{rewards: [{name: r, type: Math, arguments: {a: 1}}]}",
    placement="{nodeSelector: {a: x}}",
    lifecycle="{queueName: team-a, activeDeadlineSeconds: 5}",
)


@pytest.mark.parametrize(("path", "value"), FIXED_CHANGES, ids=lambda value: str(value))
def test_what_a_run_is_cannot_change(path: str, value: Any, runs_api: RunsApi) -> None:
    assert runs_api.create(RUNNING).code == 201
    answer = runs_api.replace(change(runs_api.get("corpus"), path, value))
    assert answer.code == 422, "it changed"
    block, _, field = f"spec.{path}".partition(".")[2].partition(".")
    blamed = f"spec.{block}.{field}" if block == "lifecycle" else f"spec.{block}"
    assert blamed in answer.fields
    assert "start a new run" in answer.message or "suspend: true first" in answer.message


def test_every_block_has_a_change_that_is_tried() -> None:
    blocks = {field.path.split(".")[1] for field in all_fields() if field.path.startswith("spec.")}
    assert {path.split(".")[0] for path, _ in FIXED_CHANGES} == blocks


def test_suspend_and_ttl_can_change_at_any_time(runs_api: RunsApi) -> None:
    assert runs_api.create(RUNNING).code == 201
    for path, value in (
        ("lifecycle.ttlSecondsAfterFinished", 5), ("lifecycle.suspend", True),
        ("lifecycle.ttlSecondsAfterFinished", None), ("lifecycle.suspend", False),
    ):  # fmt: skip
        answer = runs_api.replace(change(runs_api.get("corpus"), path, value))
        assert answer.code == 200, answer.message


def test_the_queue_can_change_while_the_run_is_suspended(runs_api: RunsApi) -> None:
    assert runs_api.create(RUNNING).code == 201
    both = change(runs_api.get("corpus"), "lifecycle.suspend", True)
    assert runs_api.replace(change(both, "lifecycle.queueName", "b")).fields == ("spec.lifecycle.queueName",)
    assert runs_api.replace(both).code == 200
    for value in ("b", None, "c"):
        answer = runs_api.replace(change(runs_api.get("corpus"), "lifecycle.queueName", value))
        assert answer.code == 200, answer.message
    assert runs_api.replace(change(runs_api.get("corpus"), "lifecycle.suspend", False)).code == 200
    assert runs_api.replace(change(runs_api.get("corpus"), "lifecycle.queueName", "d")).code == 422


def test_labels_and_annotations_can_change(runs_api: RunsApi) -> None:
    assert runs_api.create(RUNNING).code == 201
    whole = runs_api.get("corpus")
    whole["metadata"] |= {"labels": {"a": "b"}, "annotations": {"orbitrl.dev/reconcile": "disabled"}}
    assert runs_api.replace(whole).code == 200


def full_status(schema: dict[str, Any]) -> Any:
    """A status with every field that there is."""
    if is_block(schema):
        return {name: full_status(child) for name, child in schema["properties"].items()}
    if schema["type"] == "array":
        return [full_status(schema["items"])]
    if schema["type"] == "object":
        return {"through": 1}
    if "enum" in schema:
        return schema["enum"][0]
    by_type = {"integer": 1, "number": 0.5, "boolean": True, "string": "Word"}
    return TIME if schema.get("format") == "date-time" else by_type[schema["type"]]


def test_every_field_of_the_status_is_stored(runs_api: RunsApi) -> None:
    assert runs_api.create(manifest()).code == 201
    status = full_status(status_tree())
    answer = runs_api.apply_status("corpus", status)
    assert answer.code == 200, answer.message
    assert runs_api.get("corpus")["status"] == status


@pytest.mark.parametrize("reward", [1.0, 0.0, -3.0, 1e17])
def test_a_number_may_be_whole(runs_api: RunsApi, reward: float) -> None:
    assert runs_api.create(manifest()).code == 201
    answer = runs_api.apply_status("corpus", {"reward": reward, "tokensPerSecond": 1000.0})
    assert answer.code == 200, answer.message
    assert runs_api.get("corpus")["status"]["reward"] == reward


def test_a_status_cannot_be_written_with_the_object_nor_the_object_with_the_status(runs_api: RunsApi) -> None:
    assert runs_api.create(manifest(top="status: {phase: Running}\n")).code == 201
    assert "status" not in runs_api.get("corpus")
    before = runs_api.get("corpus")["metadata"]["generation"]
    assert runs_api.apply_status("corpus", {"phase": "Running"}).code == 200
    whole = runs_api.get("corpus")
    assert whole["metadata"]["generation"] == before
    whole["status"]["phase"] = "Failed"
    assert runs_api.replace(whole).code == 200
    assert runs_api.get("corpus")["status"]["phase"] == "Running"


def test_two_writers_share_the_conditions(runs_api: RunsApi) -> None:
    assert runs_api.create(manifest()).code == 201
    other = {**CONDITION, "type": "example.com/Billed", "status": "Unknown"}
    assert runs_api.apply_status("corpus", {"conditions": [CONDITION]}).code == 200
    assert runs_api.apply_status("corpus", {"conditions": [other]}, manager="billing").code == 200
    assert runs_api.apply_status("corpus", {"conditions": [{**CONDITION, "status": "False"}]}).code == 200
    found = {each["type"]: each["status"] for each in runs_api.get("corpus")["status"]["conditions"]}
    assert found == {"Progressing": "False", "example.com/Billed": "Unknown"}


@pytest.mark.parametrize(
    ("status", "field"),
    [
        ({"phase": "Sleeping"}, "status.phase"),
        ({"step": -1}, "status.step"),
        ({"steps": 1.5}, "status.steps"),
        ({"note": "x"}, ""),
        ({"conditions": [{**CONDITION, "reason": ""}]}, "status.conditions[0].reason"),
        ({"conditions": [{"type": "Progressing"}]}, "status.conditions[0].lastTransitionTime"),
        ({"attempts": [{"number": n + 1} for n in range(MAX_ATTEMPTS + 1)]}, "status.attempts"),
        ({"lastReportTime": "yesterday"}, "status.lastReportTime"),
    ],
    ids=str,
)
def test_a_status_that_is_not_one_is_refused(status: dict[str, Any], field: str, runs_api: RunsApi) -> None:
    assert runs_api.create(manifest()).code == 201
    answer = runs_api.apply_status("corpus", status)
    assert answer.code >= 400
    assert field in answer.fields, answer.message


def test_kubectl_get_prints_how_the_run_is(runs_api: RunsApi) -> None:
    assert runs_api.create(manifest(lifecycle="{queueName: team-a}")).code == 201
    status = {"phase": "Running", "reason": "Training", "step": 7, "reward": 0.5, "attempt": 2, "node": "b200-0"}
    assert runs_api.apply_status("corpus", {**status, "checkpoint": {"step": 6}}).code == 200
    names, (row,) = runs_api.columns(wide=False)
    assert names == ["Name", "Phase", "Reason", "Step", "Reward", "Attempt", "Age"]
    assert row[:-1] == ["corpus", "Running", "Training", 7, 0.5, 2]
    names, (row,) = runs_api.columns(wide=True)
    assert names[7:] == ["Model", "Precision", "Adapter", "Queue", "Node", "Checkpoint"]
    assert row[7:] == ["builtin://tiny-adder", "Auto", "LoRA", "team-a", "b200-0", 6]


def test_a_run_has_a_short_name_and_a_category(runs_api: RunsApi) -> None:
    found = runs_api.client.get("/apis/orbitrl.dev/v1alpha1").json()["resources"]
    (runs,) = [each for each in found if each["name"] == "orbitruns"]
    assert (runs["shortNames"], runs["categories"], runs["namespaced"]) == (["orun"], ["orbit"], True)


def test_every_rule_is_broken_by_a_case_of_the_corpus(runs_api: RunsApi) -> None:
    """A rule that nothing breaks is one that nobody has tried."""
    said: set[str] = set()
    for case in hand_written():
        said |= {
            cause["message"]
            for cause in runs_api.create(case.text, dry_run=True).body.get("details", {}).get("causes", [])
        }
    rules = [(path, rule["message"]) for path, rules in {"": NAME_RULES, **CHECKS}.items() for rule in rules]
    assert [rule for rule in rules if not any(rule[1] in message for message in said)] == []


def test_every_field_has_its_cases() -> None:
    tried = {case.name.partition(": ")[0] for case in field_cases()}
    free = {"spec.environment.rewards[].arguments", "spec.placement.nodeSelector"}
    assert {field.path for field in all_fields() if field.path.startswith("spec.")} - tried - free == set()
