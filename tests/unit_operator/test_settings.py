"""The operator's environment variables."""

from __future__ import annotations

import pytest

from orbit_operator.settings import Settings, load_settings
from orbit_runtime.errors import UsageError
from orbit_runtime.spec.placement import Egress, Toleration


def test_an_empty_environment_gives_the_defaults() -> None:
    assert load_settings({"PATH": "/bin", "ORBIT_OPERATOR_NAMESPACES": ""}) == Settings()


def test_every_kind_of_value_is_read() -> None:
    settings = load_settings(
        {
            "ORBIT_OPERATOR_NAMESPACES": "a, b,",
            "ORBIT_OPERATOR_WORKERS": "9",
            "ORBIT_OPERATOR_POLL_SECONDS": "2.5",
            "ORBIT_OPERATOR_NETWORK_POLICIES": "False",
            "ORBIT_OPERATOR_IDENTITY": "pod-1",
        }
    )
    assert (settings.namespaces, settings.workers, settings.poll_seconds) == (("a", "b"), 9, 2.5)
    assert (settings.network_policies, settings.holder) == (False, "pod-1")


def test_what_has_an_inner_structure_is_json_in_the_shape_of_a_manifest() -> None:
    settings = load_settings(
        {
            "ORBIT_OPERATOR_RUN_NODE_SELECTOR": '{"pool": "gpu"}',
            "ORBIT_OPERATOR_RUN_TOLERATIONS": '[{"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}]',
            "ORBIT_OPERATOR_RUN_EGRESS": '[{"cidr": "169.254.170.23/32", "ports": [80]}, {"namespace": "minio"}]',
            "ORBIT_OPERATOR_RUN_PRIORITY_CLASS": "training",
            "ORBIT_OPERATOR_RUN_ENV": '{"HTTPS_PROXY": "http://proxy:3128"}',
            "ORBIT_OPERATOR_RUN_AS_USER": "-1",
            "ORBIT_OPERATOR_RUN_QUEUE": "team-a",
            "ORBIT_OPERATOR_RUN_POD": '{"runtimeClassName": "nvidia", "resources": {"limits": {"rdma/ib": 1}}}',
            "ORBIT_OPERATOR_RUN_POD_LABELS": '{"azure.workload.identity/use": "true", "team": ""}',
            "ORBIT_OPERATOR_RUN_POD_ANNOTATIONS": '{"example.com/note": "two words"}',
        }
    )
    assert settings.run_node_selector == {"pool": "gpu"}
    assert settings.run_tolerations == (Toleration(key="dedicated", operator="Exists", effect="NoSchedule"),)
    assert settings.run_egress == (Egress(cidr="169.254.170.23/32", ports=(80,)), Egress(namespace="minio"))
    assert settings.run_priority_class == "training"
    assert (settings.run_env, settings.run_as_user) == ({"HTTPS_PROXY": "http://proxy:3128"}, -1)
    assert settings.run_queue == "team-a"
    assert settings.run_pod == {"runtimeClassName": "nvidia", "resources": {"limits": {"rdma/ib": 1}}}
    assert settings.run_pod_labels == {"azure.workload.identity/use": "true", "team": ""}
    assert settings.run_pod_annotations == {"example.com/note": "two words"}
    empty = {"NODE_SELECTOR": "{}", "TOLERATIONS": "[]", "EGRESS": "[]", "POD_LABELS": "{}", "POD_ANNOTATIONS": "{}"}
    assert load_settings({f"ORBIT_OPERATOR_RUN_{name}": text for name, text in empty.items()}) == Settings()


@pytest.mark.parametrize(
    ("name", "value", "place", "said"),
    [
        ("NODE_SELECTOR", "pool=gpu", "", "not JSON"),
        ("NODE_SELECTOR", "[]", ": nodeSelector", "dictionary"),
        ("NODE_SELECTOR", '{"pool": 1}', ": nodeSelector.pool", "string"),
        ("NODE_SELECTOR", '{"a b": "c"}', ": nodeSelector", "cannot be the key of a label"),
        ("TOLERATIONS", '[{"operator": "Exists", "value": "b"}]', ": tolerations.0.value", "takes any value"),
        ("TOLERATIONS", '[{"toleration_seconds": 1}]', ": tolerations.0.toleration_seconds", "not permitted"),
        ("EGRESS", '[{"ports": [80]}]', ": egress.0", "needs a `cidr` or a `namespace`"),
        ("EGRESS", '[{"cidr": "10.0.0.0/8", "ports": ["80"]}]', ": egress.0.ports.0", "valid integer"),
        ("PRIORITY_CLASS", "High Priority", "", "PriorityClass"),
        ("POD_LABELS", '["a"]', "", "a mapping of texts"),
        ("POD_LABELS", '{"team": true}', "", "a mapping of texts"),
        ("POD_LABELS", '{"team": "a b"}', ": team", "cannot be the value"),
        ("POD_LABELS", '{"a/b/c": "d"}', ": a/b/c", "cannot be the key"),
        ("POD_LABELS", '{"orbitrl.dev/attempt": "1"}', ": orbitrl.dev/attempt", "set by Orbit"),
        ("POD_LABELS", '{"alpha.orbitrl.dev/x": "1"}', ": alpha.orbitrl.dev/x", "set by Orbit"),
        ("POD_LABELS", '{"app.kubernetes.io/name": "x"}', ": app.kubernetes.io/name", "set by Orbit"),
        ("POD_LABELS", '{"batch.kubernetes.io/job-name": "x"}', ": batch.kubernetes.io/job-name", "set by Orbit"),
        ("POD_LABELS", '{"kueue.x-k8s.io/priority-class": "high"}', ": kueue.x-k8s.io/priority-class", "of a Job"),
        ("POD", '{"hostNetwork": true}', ": pod", "takes no `hostNetwork`"),
        ("POD", '{"labels": {"orbitrl.dev/attempt": "1"}}', ": pod.labels", "set by Orbit"),
        ("QUEUE", "team a", "", "name of a queue"),
        ("POD_ANNOTATIONS", '{"orbitrl.dev/reconcile": "x"}', ": orbitrl.dev/reconcile", "set by Orbit"),
    ],
)  # fmt: skip
def test_a_default_of_runs_that_cannot_be_is_refused_at_the_start(name: str, value: str, place: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings({f"ORBIT_OPERATOR_RUN_{name}": value})
    assert caught.value.where == f"ORBIT_OPERATOR_RUN_{name}{place}"
    assert said in str(caught.value)
    assert "in the chart's values" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORKERS", "many"),
        ("WORKERS", "0"),
        ("POLL_SECONDS", "-1"),
        ("POLL_SECONDS", "nan"),
        ("NETWORK_POLICIES", "maybe"),
        ("LOG_LEVEL", "Loud"),
        ("NAMESPACES", "team-*"),
        ("NAMESPACES", "lab,Team"),
        ("NO_SUCH", "1"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings({f"ORBIT_OPERATOR_{name}": value})
    assert caught.value.where == f"ORBIT_OPERATOR_{name}"
    assert caught.value.exit_code == 64


def test_what_kubernetes_says_of_a_service_of_the_same_name_is_no_setting() -> None:
    assert load_settings({"ORBIT_OPERATOR_SERVICE_HOST": "10.0.0.1", "ORBIT_OPERATOR_PORT_8080_TCP": "x"}) == Settings()


@pytest.mark.parametrize("text", ['{"ORBIT_ATTEMPT": "1"}', '{"HOME": "/"}', '{"no name": "1"}', '{"A": 1}', "[]"])
def test_a_variable_of_orbit_s_own_or_none_at_all_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="ORBIT_OPERATOR_RUN_ENV"):
        load_settings({"ORBIT_OPERATOR_RUN_ENV": text})
