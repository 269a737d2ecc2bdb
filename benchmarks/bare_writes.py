"""The operator's writes for a new run, sent by a client that does nothing else: the API server's share of the time.

Belongs here: copying what was written for one run, and writing the same for others. Does not belong here: the operator.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from benchmarks.simulated_cluster import EVENTS, JOBS, MAPS, POLICIES, RUNS, Client, Object

MANAGER = "fieldManager=bare-client"
APPLY = "application/apply-patch+yaml"
WORKERS = 4
"""Number of runs written at the same time: the operator's default."""
_SERVERS_OWN = ("uid", "resourceVersion", "creationTimestamp", "managedFields", "generation", "annotations")


class Writes:
    """All objects that exist because one run was created."""

    def __init__(self, run: Object, children: dict[str, Object], status: Object) -> None:
        self._name, self._uid = run["metadata"]["name"], run["metadata"]["uid"]
        self._children = {path: orjson.dumps(_as_sent(each)).decode() for path, each in children.items()}
        self._status = status

    @classmethod
    async def read(cls, client: Client, name: str, status: Object) -> Writes:
        """Reads those of a run whose objects the operator has created; `status` is the first status that it wrote."""
        children = {
            MAPS: await client.call("GET", f"{MAPS}/{name}-manifest"),
            POLICIES: await client.call("GET", f"{POLICIES}/{name}"),
            JOBS: await client.call("GET", f"{JOBS}/{name}-a1"),
            EVENTS: (await client.call("GET", f"{EVENTS}?fieldSelector=involvedObject.name={name}"))["items"][0],
        }
        return cls(await client.call("GET", f"{RUNS}/{name}"), children, status)

    async def repeat(self, client: Client, manifests: list[Object]) -> float:
        """Creates these runs and writes the same objects for each; returns the seconds until all of them exist."""
        places = asyncio.Semaphore(WORKERS)

        async def make(manifest: Object) -> None:
            made = (await client.call("POST", RUNS, manifest))["metadata"]
            async with places:
                await self._write(client, made["name"], made["uid"])

        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(make(manifest) for manifest in manifests))
        return loop.time() - began

    async def _write(self, client: Client, name: str, uid: str) -> None:
        """In the operator's order; concurrently what the operator writes concurrently."""

        def build(path: str) -> Object:
            return dict(orjson.loads(self._children[path].replace(self._name, name).replace(self._uid, uid)))

        async def apply(path: str, body: Object, sub: str = "") -> None:
            place = f"{path}/{body['metadata']['name']}{sub}?{MANAGER}&force=true"
            await client.call("PATCH", place, body, APPLY)

        await asyncio.gather(apply(MAPS, build(MAPS)), apply(POLICIES, build(POLICIES)))
        await client.call("POST", f"{JOBS}?{MANAGER}", build(JOBS))
        head = {"apiVersion": "orbitrl.dev/v1alpha1", "kind": "OrbitRun", "metadata": {"name": name}}
        await asyncio.gather(
            apply(RUNS, {**head, "status": self._status}, "/status"),
            client.call("POST", f"{EVENTS}?{MANAGER}", build(EVENTS)),
        )


def _as_sent(found: Object) -> Object:
    """Without what the server and its controllers add."""
    sent: dict[str, Any] = {name: value for name, value in found.items() if name != "status"}
    sent["metadata"] = {name: value for name, value in sent["metadata"].items() if name not in _SERVERS_OWN}
    if found.get("kind") == "Job":
        template = sent["spec"]["template"]
        for labels in (sent["metadata"]["labels"], template["metadata"]["labels"]):
            for name in [name for name in labels if "job-name" in name or "controller-uid" in name]:
                del labels[name]
        sent["spec"] = {name: value for name, value in sent["spec"].items() if name != "selector"}
    return sent
