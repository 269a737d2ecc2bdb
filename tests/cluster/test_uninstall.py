"""The end of an installation: what stays is the CRD and the runs. These run after everything else on the cluster."""

from __future__ import annotations

import pytest
from cluster.bed.cluster import Cluster
from cluster.shell import Shell

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
LEFT = """
apiVersion: orbitrl.dev/v1alpha1
kind: OrbitRun
metadata: {name: left, namespace: team-a}
spec:
  model: {uri: "builtin://tiny-adder"}
  data: {prompts: [{uri: "builtin://two-digit-addition"}]}
  environment: {rewards: [{name: correct, type: ExactMatch}]}
  training: {steps: 1}
  storage: {uri: "s3://orbit-runs/team-a", deletionPolicy: Delete}
  lifecycle: {suspend: true}
"""


def list_objects(shell: Shell) -> set[str]:
    """`namespace/kind/name` of everything that can be listed, but for what the cluster itself makes as time passes."""
    script = """
    kinds=$(kubectl api-resources --verbs=list -o name | grep -v -e '^events' -e '^leases' -e metrics | paste -sd,)
    kubectl get "$kinds" --all-namespaces --ignore-not-found \\
      -o go-template='{{range .items}}{{.metadata.namespace}}/{{.kind}}/{{.metadata.name}}{{"\\n"}}{{end}}'
    """
    return set(shell.run(script).split())


def test_what_an_installation_leaves_is_the_crd_and_the_runs(release: Shell, cluster: Cluster) -> None:
    (shell_file := release.folder / "left.yaml").write_text(LEFT)
    release.run(f"kubectl apply -f {shell_file.name}")
    release.run("kubectl wait orun/left --namespace team-a --for=condition=Suspended --timeout=60s")
    release.run("helm uninstall orbit --namespace orbit-system --wait --timeout 5m")
    # Pods end after their Deployment.
    release.run("kubectl wait pods --all --namespace orbit-system --for=delete --timeout=60s")
    managed = "kubectl get {} --all-namespaces --ignore-not-found -o name -l app.kubernetes.io/managed-by=Helm"
    kinds = release.run("kubectl api-resources --verbs=list -o name | grep -v metrics | paste -sd,").strip()
    assert release.run(managed.format(kinds)).split() == [
        "customresourcedefinition.apiextensions.k8s.io/orbitruns.orbitrl.dev"
    ]
    left = {each for each in list_objects(release) if "orbit" in each.lower()}
    ours = {each for each in left if each.split("/")[1] not in ("Namespace", "ConfigMap", "ServiceAccount")}
    assert ours == {
        "<no value>/CustomResourceDefinition/orbitruns.orbitrl.dev",
        "<no value>/APIService/v1alpha1.orbitrl.dev",
        "team-a/OrbitRun/left",
        "team-a/Secret/orbit-store",
    }, "what the guides made by hand is theirs"


def test_a_run_that_waits_for_an_operator_is_let_go(release: Shell) -> None:
    release.run("kubectl delete orun left --namespace team-a --wait=false")
    release.say(
        "install",
        """kubectl patch orun NAME --namespace team-a --type=merge -p '{"metadata":{"finalizers":null}}'""",
        NAME="left",
    )
    release.run("kubectl wait orun/left --namespace team-a --for=delete --timeout=30s")
    release.say("install", "kubectl delete crd orbitruns.orbitrl.dev")
