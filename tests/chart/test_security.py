"""What the chart may never do, in any combination of values."""

from __future__ import annotations

import re
from typing import Any

import pytest
from chart.rendering import ALL_MONITORING, COMBINATIONS, NAMESPACE, Object, of_kind, pick, render
from chart.restricted import violations

from orbit_operator.lease import CLAIM

CLUSTER_WIDE = ("ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "PriorityClass", "Namespace")


def pods(objects: list[Object]) -> list[Object]:
    """The `spec` of every pod, those of Deployments and of `helm test` included."""
    made = [each["spec"]["template"]["spec"] for each in of_kind(objects, "Deployment")]
    return made + [each["spec"] for each in of_kind(objects, "Pod")]


def rules(objects: list[Object]) -> list[tuple[str, Object]]:
    return [
        (f"{each['kind']} {each['metadata']['name']}", rule)
        for each in of_kind(objects, "Role", "ClusterRole")
        for rule in each["rules"]
    ]


def test_every_pod_meets_the_restricted_standard(helm: str, combination: str) -> None:
    found = pods(render(helm, COMBINATIONS[combination]))
    assert found
    assert [violations(pod) for pod in found] == [[] for _ in found]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("runAsNonRoot", False),
        ("allowPrivilegeEscalation", True),
        ("privileged", True),
        ("runAsUser", 0),
        ("capabilities", {"drop": ["NET_RAW"]}),
        ("capabilities", {"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
        ("seccompProfile", {"type": "Unconfined"}),
    ],
)
def test_the_standard_finds_each_violation(field: str, value: Any) -> None:
    (pod,) = [each["spec"]["template"]["spec"] for each in of_kind(render("helm4", {}), "Deployment")]
    container = pod["containers"][0]
    broken = {**container, "securityContext": {**container["securityContext"], field: value}}
    assert len(violations({**pod, "containers": [broken]})) == 1
    assert violations({**pod, "hostNetwork": True}) == ["hostNetwork"]
    assert violations({**pod, "volumes": [{"name": "v", "hostPath": {"path": "/"}}]}) == ["volume v: hostPath"]


def test_root_file_systems_are_read_only_and_memory_is_limited(helm: str, combination: str) -> None:
    for pod in pods(render(helm, COMBINATIONS[combination])):
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"]["cpu"]


def test_no_role_has_a_verb_on_secrets_or_a_wildcard(helm: str, combination: str) -> None:
    for name, rule in rules(render(helm, COMBINATIONS[combination])):
        assert not any(resource.split("/")[0] == "secrets" for resource in rule["resources"]), name
        assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"]), name
        assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"]), name
        for resource in ("pods/exec", "pods/attach", "serviceaccounts/token", "nodes/proxy"):
            assert resource not in rule["resources"], name


def test_the_operator_cannot_create_runs(helm: str, combination: str) -> None:
    for name, rule in rules(render(helm, COMBINATIONS[combination])):
        if name.endswith("-operator") and "orbitruns" in rule["resources"]:
            assert "create" not in rule["verbs"]


def test_each_watched_namespace_has_its_role_and_no_other(helm: str) -> None:
    objects = render(helm, COMBINATIONS["two-namespaces"])
    made = {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in of_kind(objects, "Role")}
    assert made == {
        ("team-a", "orbit-operator"),
        ("team-b", "orbit-operator"),
        (NAMESPACE, "orbit-operator-lease"),
        ("team-a", "orbit-test"),
    }
    for binding in of_kind(objects, "RoleBinding"):
        (subject,) = binding["subjects"]
        expected = "orbit-test" if binding["metadata"]["name"] == "orbit-test" else "orbit-operator"
        assert (subject["namespace"], subject["name"]) == (NAMESPACE, expected)
        assert binding["roleRef"]["name"] == binding["metadata"]["name"]


def test_by_default_nothing_cluster_wide_can_be_written(helm: str) -> None:
    for role in of_kind(render(helm, {}), "ClusterRole"):
        writes = [rule for rule in role["rules"] if set(rule["verbs"]) - {"get", "list", "watch"}]
        if role["metadata"]["name"].endswith("-runs-edit"):
            assert [rule["resources"] for rule in writes] == [["orbitruns"]]
        else:
            assert writes == []


def test_it_installs_with_the_rights_of_one_namespace(helm: str) -> None:
    objects = render(helm, {**COMBINATIONS["no-cluster-wide-object"], "tests": {"enabled": True}})
    assert of_kind(objects, *CLUSTER_WIDE) == []
    assert {each["metadata"]["namespace"] for each in objects} == {NAMESPACE}


def test_the_lease_is_the_only_one_it_may_change(helm: str) -> None:
    objects = render(helm, {})
    lease = pick(objects, "Lease")["metadata"]["name"]
    made, rule = pick(objects, "Role", "orbit-operator-lease")["rules"]
    assert (made["resources"], made["verbs"]) == (["leases"], ["create"]), "RBAC limits this to no name"
    assert (rule["resourceNames"], rule["verbs"]) == ([lease], ["get", "update"])


def test_of_the_leases_of_a_watched_namespace_it_may_change_the_one_that_says_who_owns_it(helm: str) -> None:
    rules = pick(render(helm, {}), "Role", "orbit-operator")["rules"]
    made, rule = (each for each in rules if each["resources"] == ["leases"])
    assert made["verbs"] == ["create"], "RBAC limits this to no name"
    assert (rule["resourceNames"], rule["verbs"]) == ([CLAIM], ["get", "update"])


def test_fences_stand_where_they_are_asked_for_and_in_the_watched_namespaces_only(helm: str) -> None:
    kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    assert of_kind(render(helm, {}), *kinds) == []
    for fence in (
        {"maxGPUs": 8},
        {"images": ["a/"]},
        {"secrets": ["a"]},
        {"serviceAccounts": ["a"]},
        {"forbidEgress": True},
    ):
        policy, binding = of_kind(render(helm, {"fences": fence, "watchNamespaces": ["team-a"]}), *kinds)
        assert len(policy["spec"]["validations"]) == (2 if "maxGPUs" in fence else 1)
        (matched,) = policy["spec"]["matchConstraints"]["resourceRules"]
        assert (matched["resources"], matched["operations"]) == (["orbitruns"], ["CREATE"])
        assert binding["spec"]["policyName"] == policy["metadata"]["name"]
        (selected,) = binding["spec"]["matchResources"]["namespaceSelector"]["matchExpressions"]
        assert selected["values"] == ["team-a"]
    (_, everywhere) = of_kind(render(helm, {"fences": {"maxGPUs": 8}, "clusterScope": True}), *kinds)
    assert "matchResources" not in everywhere["spec"]


def test_the_operator_takes_only_from_those_who_may_scrape_it(helm: str) -> None:
    policy = pick(render(helm, COMBINATIONS["everything"]), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    (rule,) = policy["ingress"]
    assert rule["ports"] == [{"port": "metrics"}]
    values = [
        each["namespaceSelector"]["matchExpressions"][0]["values"]
        for each in rule["from"]
        if "namespaceSelector" in each
    ]
    assert values == [["monitoring"]]
    api = next(rule for rule in policy["egress"] if {"port": 443} in rule["ports"])
    assert api["to"] == [{"ipBlock": {"cidr": "10.0.0.1/32"}}]


def test_tokens_are_mounted_only_where_asked_for(helm: str, combination: str) -> None:
    objects = render(helm, COMBINATIONS[combination])
    assert all(each["automountServiceAccountToken"] is False for each in of_kind(objects, "ServiceAccount"))
    assert all(pod["automountServiceAccountToken"] is True for pod in pods(objects))


def test_helm_test_leaves_nothing_behind(helm: str) -> None:
    hooks = [each for each in render(helm, {}) if "helm.sh/hook" in each["metadata"].get("annotations", {})]
    assert {each["kind"] for each in hooks} == {"Pod", "ServiceAccount", "Role", "RoleBinding"}
    for each in hooks:
        policy = each["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
        assert set(policy.split(",")) == {"before-hook-creation", "hook-succeeded", "hook-failed"}


def test_no_value_reaches_the_operator_as_a_shell_would_read_it(helm: str) -> None:
    """Settings travel in the environment; commands are fixed lists."""
    objects = render(helm, {**COMBINATIONS["everything"], "monitoring": ALL_MONITORING})
    container = pick(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["python", "-m", "orbit_operator"]
    assert "args" not in container
    for variable in container["env"]:
        assert re.fullmatch(r"ORBIT_OPERATOR_[A-Z_]+", variable["name"])
        assert not re.search(r"\$\(", variable.get("value", ""))
