"""What `helm test` runs, in the operator's image: is the release able to work? Standard library only.

`operator`, as the operator's account: the CRD is served, it has its rights and none on secrets, metrics answer.
`user`, as an account that may only create runs: the API server takes a good OrbitRun and refuses a bad one (dry run).
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
API = "/apis/orbitrl.dev/v1alpha1"
SECRET_VERBS = ["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"]
RUN = {
    "apiVersion": "orbitrl.dev/v1alpha1",
    "kind": "OrbitRun",
    "metadata": {"name": "helm-test"},
    "spec": {
        "model": {"uri": "builtin://tiny-adder"},
        "data": {"prompts": [{"uri": "builtin://two-digit-addition"}]},
        "environment": {"rewards": [{"name": "correct", "type": "ExactMatch"}]},
        "training": {"steps": 1},
        "storage": {"uri": "s3://bucket/prefix"},
    },
}


def ask(method, path, body=None):
    """Status code and answer of the API server."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    with open(f"{ACCOUNT}/token") as token:
        headers = {"Authorization": f"Bearer {token.read()}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"https://{host}:{port}{path}", data, headers, method=method)
    context = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


def may(verb, group, resource, namespace, name=""):
    resource, _, subresource = resource.partition("/")
    attributes = {"verb": verb, "group": group, "resource": resource, "subresource": subresource, "name": name}
    if namespace:
        attributes["namespace"] = namespace
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
              "spec": {"resourceAttributes": attributes}}  # fmt: skip
    status, answer = ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    if status != 201:
        raise SystemExit(f"FAILED: the API server does not answer questions about rights: {status} {answer}")
    return answer["status"].get("allowed", False)


def check_crd():
    status, answer = ask("GET", API)
    served = [resource["name"] for resource in answer.get("resources", ())]
    found = "orbitruns" in served and "orbitruns/status" in served
    return [] if found else [f"the CRD is not served ({status}): install with crds.install=true, or apply it yourself"]


def check_rights():
    """Every right that the operator's Role names, in every watched namespace; no right on secrets anywhere."""
    missing = []
    for namespace in os.environ["NAMESPACES"].split(","):
        for rule in json.loads(os.environ.get("RULES", "[]")):
            # A rule for named objects is asked about by the first name.
            name = rule.get("resourceNames", [""])[0]
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    if not may(verb, rule["apiGroups"][0], resource, namespace, name):
                        missing.append(f"the operator may not {verb} {resource} in {namespace or 'all namespaces'}")
        for verb in SECRET_VERBS:
            if may(verb, "", "secrets", namespace):
                missing.append(
                    f"the operator may {verb} secrets in {namespace or 'all namespaces'}: take that right away"
                )
    return missing


def check_metrics():
    url, error = os.environ["METRICS_URL"], None
    for _ in range(15):
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                text = answer.read().decode()
            if "orbit_operator_" in text:
                return []
            return [f"{url} answers, and not as the operator does"]
        except OSError as reason:
            error = reason
            time.sleep(2)
    return [f"{url} does not answer: {error}"]


def check_dry_run():
    path = f"{API}/namespaces/{os.environ['TARGET']}/orbitruns?dryRun=All"
    problems = []
    status, answer = ask("POST", path, RUN)
    # A run of that name is a proof, too: the API server looked at the object first.
    if status not in (201, 409):
        problems.append(f"a good OrbitRun is refused: {status} {answer.get('message')}")
    status, answer = ask("POST", path, {**RUN, "spec": {**RUN["spec"], "training": {"steps": 0}}})
    if status != 422:
        problems.append(f"an OrbitRun with no steps is not refused: {status}; is the CRD older than the operator?")
    return problems


CHECKS = {"operator": [check_crd, check_rights, check_metrics], "user": [check_dry_run]}

if __name__ == "__main__":
    failures = []
    for check in CHECKS[sys.argv[1]]:
        found = check()
        print(f"{'FAILED' if found else 'ok'}: {check.__name__}", *found, sep="\n  ", flush=True)
        failures += found
    sys.exit(1 if failures else 0)
