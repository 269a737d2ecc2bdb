"""A client of the API server that exchanges plain dictionaries over one connection pool.

Belongs here: verbs, paths, time limits, errors. Does not belong here: what is read or written (`observe`, `apply`).
Only the transport of the Kubernetes client is used: its thousand model classes would need more memory than a thousand
runs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import orjson
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

MANAGER = "orbit-operator"
REQUEST_SECONDS, LEASE_SECONDS = 20.0, 4.0
"""A renewal that hangs must leave time for another before the Lease lapses."""
LARGEST_PAGE = 100
"""Objects per page. A page is parsed whole, with the managed fields of each object."""
CONNECTIONS = 16
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object, and its place in the API."""

    prefix: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        parts = [self.prefix]
        parts += ["namespaces", quote(namespace)] if namespace is not None else []
        parts += [self.plural, *(quote(part) for part in (name, subresource) if part is not None)]
        return "/".join(parts)


RUNS = Kind("/apis/orbitrl.dev/v1alpha1", "orbitruns")
JOBS = Kind("/apis/batch/v1", "jobs")
PODS = Kind("/api/v1", "pods")
NODES = Kind("/api/v1", "nodes")
EVENTS = Kind("/api/v1", "events")
CONFIG_MAPS = Kind("/api/v1", "configmaps")
NETWORK_POLICIES = Kind("/apis/networking.k8s.io/v1", "networkpolicies")
RAY_CLUSTERS = Kind("/apis/ray.io/v1", "rayclusters")
LEASES = Kind("/apis/coordination.k8s.io/v1", "leases")


class ApiError(Exception):
    """The API server refused a request, or did not answer (status 0)."""

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{status or 'no answer'} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


class Api:
    """Safe to share between tasks. Every call ends within its time limit.

    Args:
        may_write: called before every call that changes anything but a Lease; raises if this operator must not write.
        observe: called after every call with verb, plural, status and seconds.
    """

    def __init__(
        self,
        client: ApiClient,
        *,
        may_write: Callable[[], None] = lambda: None,
        observe: Callable[[str, str, int, float], None] = lambda *_: None,
    ) -> None:
        self._client = client
        self.may_write = may_write
        self.observe = observe

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Body | None:
        """The object, or `None` if it does not exist."""
        try:
            return await self.call("GET", kind, kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self, kind: Kind, namespace: str | None, query: Mapping[str, str], *, metadata_only: bool = False
    ) -> AsyncIterator[Body]:
        """Yields objects, fetched page by page. The first item of each page is read from one consistent state."""
        accept = METADATA_ONLY if metadata_only else "application/json"
        following = ""
        while True:
            page = {**query, "limit": str(LARGEST_PAGE), **({"continue": following} if following else {})}
            if following:
                page.pop("resourceVersion", None)
            answer = await self.call("GET", kind, kind.path(namespace), page, accept=accept)
            for item in answer.get("items") or ():
                yield item
            following = (answer.get("metadata") or {}).get("continue") or ""
            if not following:
                return

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Body:
        return await self._write("POST", kind, kind.path(namespace), {"fieldManager": MANAGER}, body)

    async def apply(self, kind: Kind, namespace: str, body: Mapping[str, Any], subresource: str | None = None) -> Body:
        """Server-side apply of a whole object: fields that we own and omit are removed; fields of other owners stay."""
        path = kind.path(namespace, body["metadata"]["name"], subresource)
        query = {"fieldManager": MANAGER, "force": "true"}
        return await self._write("PATCH", kind, path, query, body, "application/apply-patch+yaml")

    async def merge(self, kind: Kind, namespace: str, name: str, body: Mapping[str, Any]) -> Body:
        path = kind.path(namespace, name)
        return await self._write("PATCH", kind, path, {"fieldManager": MANAGER}, body, "application/merge-patch+json")

    async def replace(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Body:
        """Fails with 409 if the object has changed since its `resourceVersion`."""
        path = kind.path(namespace, body["metadata"]["name"])
        return await self._write("PUT", kind, path, {"fieldManager": MANAGER}, body)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """Deletes exactly this object and, in the background, what it owns. An object that is gone is not an error.

        409 is raised if the name now belongs to another object, or if the API server gave up because of concurrent
        writers; then our object still exists. The next look tells which.
        """
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._write("DELETE", kind, kind.path(namespace, name), {}, body)
        except ApiError as error:
            if error.status != 404:
                raise

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    async def _write(
        self, verb: str, kind: Kind, path: str, query: Mapping[str, str], body: Mapping[str, Any], form: str = ""
    ) -> Body:
        if kind is not LEASES:
            self.may_write()
        return await self.call(verb, kind, path, query, body=body, content=form or "application/json")

    async def call(
        self,
        verb: str,
        kind: Kind,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Mapping[str, Any] | None = None,
        accept: str = "application/json",
        content: str = "application/json",
    ) -> Body:
        """Sends one request. Raises ApiError for every response other than 2xx."""
        seconds = LEASE_SECONDS if kind is LEASES else REQUEST_SECONDS
        began, status = time.monotonic(), 0
        headers = {"Accept": accept, "Content-Type": content}
        url = self._client.configuration.host + path + (f"?{urlencode(query)}" if query else "")
        try:
            await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, verb, body)
            limit = aiohttp.ClientTimeout(total=seconds, sock_connect=5.0)
            response = await self._client.rest_client.request(  # type: ignore[no-untyped-call]
                verb, url, headers=headers, body=body, _request_timeout=limit
            )
            status = response.status
            data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(0, type(error).__name__, str(error)) from None
        finally:
            self.observe(verb, kind.plural, status, time.monotonic() - began)
        if 200 <= status < 300:
            return dict(orjson.loads(data)) if data else {}
        raise _error(status, data, response.headers.get("Retry-After"))


def _error(status: int, data: bytes, retry_after: str | None) -> ApiError:
    try:
        answer = orjson.loads(data)
    except orjson.JSONDecodeError:
        answer = {}
    facts = answer if isinstance(answer, dict) else {}
    seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
    text = str(facts.get("message") or data[:200].decode(errors="replace"))
    return ApiError(status, str(facts.get("reason") or "Unknown"), text, seconds)


async def open_api(**options: Any) -> Api:
    """Connects with the rights of the pod's service account, or else with those of the kubeconfig file."""
    configuration = Configuration()
    if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    else:
        await config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    configuration.connection_pool_maxsize = CONNECTIONS
    # With it, every single request would look for ~/.netrc in a thread.
    configuration.client_session_kwargs = {"trust_env": False}
    # Retrying is the work queue's: a request is repeated only after looking again.
    configuration.retries = None
    return Api(ApiClient(configuration), **options)


async def wait_for_api(api: Api, stopping: asyncio.Event) -> None:
    """Waits until the API server answers: a node that restarts starts everything at once."""
    delay = 0.5
    while not stopping.is_set():
        try:
            await api.call("GET", Kind("", "version"), "/version")
        except ApiError as error:
            if error.status:
                return
            await asyncio.sleep(delay)
            delay = min(10.0, 2 * delay)
        else:
            return
