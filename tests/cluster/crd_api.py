"""OrbitRuns on a real API server, as a test sees them.

Belongs here: installing the CRD, sending manifests the way `kubectl` does, and reading the answer's field paths.
Does not belong here: starting the server.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import httpx

from orbit_runtime.spec.crd import GROUP, PLURAL, VERSION, build_crd

NAMESPACE = "default"
RUNS = f"/apis/{GROUP}/{VERSION}/namespaces/{NAMESPACE}/{PLURAL}"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_UNKNOWN = re.compile(r'unknown field "([^"]+)"')


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server said."""

    code: int
    body: dict[str, Any]

    @property
    def fields(self) -> tuple[str, ...]:
        """Every field that it blames; `("",)` where it refuses the whole; empty where it accepts."""
        if self.code < 300:
            return ()
        found = {cause.get("field", "") for cause in self.body.get("details", {}).get("causes", [])}
        found |= set(_UNKNOWN.findall(self.body.get("message", "")))
        # Said besides the fields, where some rules could not be checked.
        found = {name for name in found if name not in ("", "<nil>")}
        return tuple(sorted(found)) or ("",)

    @property
    def message(self) -> str:
        return str(self.body.get("message", ""))


class RunsApi:
    """Calls on OrbitRuns."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def install(self, crd: dict[str, Any] | None = None) -> None:
        """The CRD, new or instead of the one that is there, and served."""
        body = build_crd() if crd is None else crd
        name = body["metadata"]["name"]
        done = self.client.patch(
            f"{CRDS}/{name}?fieldManager=test&force=true",
            headers={"Content-Type": "application/apply-patch+yaml"},
            json=body,
        )
        assert done.status_code < 300, done.text
        for _ in range(200):
            conditions = self.client.get(f"{CRDS}/{name}").json()["status"].get("conditions") or []
            if any(each["type"] == "Established" and each["status"] == "True" for each in conditions):
                break
            time.sleep(0.05)
        for _ in range(200):
            if self.client.get(RUNS).status_code == 200:
                return
            time.sleep(0.05)
        raise AssertionError("the CRD is not served")

    def create(self, text: str, *, dry_run: bool = False) -> Answer:
        """Creates as `kubectl create --validate=strict`: the server reads the YAML with the library
        that kubectl has.
        """
        query = "?fieldValidation=Strict&fieldManager=test" + ("&dryRun=All" if dry_run else "")
        return self._answer(
            self.client.post(RUNS + query, headers={"Content-Type": "application/yaml"}, content=text.encode())
        )

    def get(self, name: str) -> dict[str, Any]:
        found = self.client.get(f"{RUNS}/{name}")
        assert found.status_code == 200, found.text
        return dict(found.json())

    def replace(self, whole: dict[str, Any]) -> Answer:
        """Replaces as `kubectl replace`."""
        return self._answer(self.client.put(f"{RUNS}/{whole['metadata']['name']}?fieldValidation=Strict", json=whole))

    def apply_status(self, name: str, status: dict[str, Any], manager: str = "orbit-operator") -> Answer:
        """Server-side apply of the status, as the operator writes it."""
        head = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "OrbitRun", "metadata": {"name": name}}
        query = f"?fieldManager={manager}&force=true&fieldValidation=Strict"
        headers = {"Content-Type": "application/apply-patch+yaml"}
        body = {**head, "status": status}
        return self._answer(self.client.patch(f"{RUNS}/{name}/status{query}", headers=headers, json=body))

    def delete_all(self) -> None:
        self.client.delete(RUNS)

    def columns(self, *, wide: bool) -> tuple[list[str], list[list[Any]]]:
        """Header and rows that `kubectl get` prints, with `-o wide` or without."""
        head = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
        table = self.client.get(RUNS, headers=head).json()
        shown = [index for index, each in enumerate(table["columnDefinitions"]) if wide or not each["priority"]]
        names = [table["columnDefinitions"][index]["name"] for index in shown]
        return names, [[row["cells"][index] for index in shown] for row in table["rows"]]

    @staticmethod
    def _answer(response: httpx.Response) -> Answer:
        return Answer(response.status_code, response.json())
