"""The chart rendered by a real Helm, in the combinations of values that all tests of this folder share.

Belongs here: combinations, rendering, and finding an object in the result. Does not belong here: judgements.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any, cast

import yaml
from chart.programs import CHART, find_program, run, run_well

Object = dict[str, Any]

RELEASE, NAMESPACE = "orbit", "orbit-system"
MONITORING = {"enabled": True}
ALL_MONITORING: Object = {
    "additionalLabels": {"release": "prometheus"},
    "serviceMonitor": MONITORING,
    "podMonitor": MONITORING,
    "rules": {"enabled": True, "labels": {"team": "rl"}, "runbookURLPrefix": "docs/operations.md#"},
    "dashboards": {"enabled": True, "namespace": "grafana"},
}

COMBINATIONS: dict[str, Object] = {
    "defaults": {},
    "two-namespaces": {"watchNamespaces": ["team-a", "team-b"], "runs": {"protectFromEviction": True}},
    "whole-cluster": {"clusterScope": True, "monitoring": ALL_MONITORING},
    "everything": {
        "watchNamespaces": ["team-a"],
        "image": {"repository": "images.example.com/orbit-operator", "digest": "sha256:" + "0" * 64},
        "imagePullSecrets": [{"name": "pull"}],
        "runs": {
            "image": {"repository": "images.example.com/orbit-runtime", "tag": "1.2.3"},
            "engineImage": "images.example.com/orbit-engine:1.2.3",
            "imagePullSecrets": ["pull", {"name": "other"}],
            "cpu": 16,
            "cpuRequestPerGPU": 2.5,
            "memory": "1Ti",
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [
                {"key": "dedicated", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 86400000}
            ],
            "egress": [{"cidr": "169.254.170.23/32", "ports": [80]}, {"namespace": "minio"}],
            "env": {"HTTPS_PROXY": "http://proxy:3128"},
            "caConfigMap": "our-cas",
            "runAsUser": None,
            "priorityClassName": "training",
            "podLabels": {"azure.workload.identity/use": "true"},
            "queueName": "default-queue",
            "pod": {"runtimeClassName": "nvidia", "labels": {"kueue.x-k8s.io/priority-class": "high"}},
            "podAnnotations": {"example.com/note": 'a "quoted" <word> \\'},
            "ttlSecondsAfterFinished": 86400,
            "protectFromEviction": True,
        },
        "operator": {"logLevel": "Debug", "pollSeconds": 0.5 + 1, "resyncSeconds": 1000000},
        "priorityClassName": "infra",
        "nodeSelector": {"role": "infra"},
        "tolerations": [{"key": "infra", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"example.com/note": "1"},
        "podLabels": {"example.com/team": "rl"},
        "serviceAccount": {"annotations": {"example.com/role": "x"}},
        "networkPolicy": {
            "scrapeNamespaces": ["monitoring"],
            "apiServerCIDRs": ["10.0.0.1/32"],
            "httpsCIDRs": ["10.1.0.0/16"],
            "dnsPorts": [1053],
        },
        "fences": {
            "maxGPUs": 64,
            "images": ["images.example.com/"],
            "secrets": ["store"],
            "serviceAccounts": ["orbit-runs"],
            "forbidEgress": True,
        },
        "monitoring": ALL_MONITORING,
    },
    "as-little-as-possible": {
        "fullnameOverride": "small",
        "serviceAccount": {"create": False, "name": "given"},
        "rbac": {"create": False, "aggregate": False},
        "crds": {"install": False},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "tests": {"enabled": False},
    },
    "no-cluster-wide-object": {"crds": {"install": False}, "rbac": {"nodes": False, "aggregate": False}},
    "as-a-subchart": {"global": {"anything": "goes"}},
}


class _Loader(yaml.CSafeLoader):
    """In C, because hundreds of renderings hold the CRD each; and `6e-05` is a number, as Kubernetes reads it."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"]
)


def render_text(helm: str, values: Object, kube_version: str = "1.34.1") -> str:
    """What `helm template` prints, test hooks included."""
    done = _template(helm, json.dumps(values), kube_version)
    assert done[0] == 0, done[2]
    return done[1]


def render(helm: str, values: Object, kube_version: str = "1.34.1") -> list[Object]:
    """All objects of a rendering. Others get the same ones: to be read only."""
    parts = re.split(r"(?m)^---$", render_text(helm, values, kube_version))
    return [each for part in parts if (each := _parse(part)) is not None]


@cache
def _parse(part: str) -> Object | None:
    """Once for each text: the CRD alone is most of a rendering, and the same in all of them."""
    return cast("Object | None", yaml.load(part, _Loader))


def refusal(helm: str, values: Object, *, with_monitoring_api: bool = True) -> str:
    """What Helm says to values that it must not take."""
    code, out, error = _template(helm, json.dumps(values), "1.34.1", with_monitoring_api)
    assert code != 0, f"accepted: {values}\n{out[:500]}"
    return error


@cache
def _template(helm: str, values: str, kube_version: str, with_monitoring_api: bool = True) -> tuple[int, str, str]:
    apis = ["--api-versions", "monitoring.coreos.com/v1"] if with_monitoring_api else []
    command = [find_program(helm), "template", RELEASE, CHART, "--namespace", NAMESPACE, "--kube-version", kube_version]
    done = run(*command, *apis, "--values", "-", stdin=values)
    return done.returncode, done.stdout, done.stderr


def lint(helm: str, values: Object) -> str:
    """`helm lint --strict`, which must find nothing."""
    return run_well(
        find_program(helm),
        "lint",
        "--strict",
        CHART,
        "--namespace",
        NAMESPACE,
        "--values",
        "-",
        stdin=json.dumps(values),
    )


def pick(objects: list[Object], kind: str, name: str = "") -> Object:
    """The one object of a kind, and of a name where there are several."""
    found = [each for each in objects if each["kind"] == kind and name in ("", each["metadata"]["name"])]
    assert len(found) == 1, [each["metadata"]["name"] for each in objects if each["kind"] == kind]
    return found[0]


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]
