"""The process: settings, Lease, ports, watching, workers, and shutdown within 25 seconds.

Belongs here: starting and stopping the parts. Does not belong here: what they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import fields

import kopf
import orjson

from orbit_operator.api import Api, ApiError, open_api, wait_for_api
from orbit_operator.apply import NameTakenError, Writer
from orbit_operator.cache import Cache, Key
from orbit_operator.crd_check import find_crd_problem, wait_for_crd
from orbit_operator.events import Recorder
from orbit_operator.handlers import build_kopf_settings, build_registry
from orbit_operator.health import Health, start_servers
from orbit_operator.intake import Intake
from orbit_operator.lease import CLAIM_SECONDS, Claims, Lease, LeaseLostError
from orbit_operator.manifests.source import metrics_port_of
from orbit_operator.metrics import Metrics
from orbit_operator.namespaces import EVERYWHERE, NamespaceView
from orbit_operator.observe import Observer
from orbit_operator.plan import Limits
from orbit_operator.poll import Poller
from orbit_operator.read import has_ended
from orbit_operator.reconcile import Parts, reconcile
from orbit_operator.resync import Resync
from orbit_operator.settings import PREFIX, Settings, load_settings
from orbit_operator.work_queue import WorkQueue
from orbit_runtime.errors import OrbitError

FIRST_CHECK_SECONDS, CHECK_SECONDS = 1.0, 60.0
"""Seconds before the first comparison of the cache with the API server, and between later ones."""
CHECKED_PER_SECOND, LOOKS_PER_SECOND = 10.0, 3.0
"""Limits on objects compared and runs looked at again per second: many objects or runs make each less frequent."""
ENDED_SECONDS = 3600.0
"""The longest wait before another look at a run that has ended and will be deleted."""
EXIT_LEASE_LOST = 75
_log = logging.getLogger("orbit.operator")


class Operator:
    """Everything that lives as long as the process."""

    def __init__(self, settings: Settings, api: Api) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.health = Health(lease_problem=lambda: self.lease.problem)
        self.cache = Cache()
        self.sight = NamespaceView(self.sight_changed, settings.namespaces or (EVERYWHERE,))
        self.queue: WorkQueue[Key] = WorkQueue(waited=self.metrics.waited.observe)
        self.unread: dict[Key, dict[str, int]] = {}
        """Versions of runs that arrived during a pass over them."""
        self.api = api
        self.lease = Lease(
            api,
            namespace=settings.namespace,
            name=settings.lease_name,
            holder=settings.holder,
            seconds=settings.lease_seconds,
        )
        self.claims = Claims(api, f"{settings.namespace}/{settings.lease_name}", self.health.others)
        observer = Observer(api, self.cache, settings.run_queue, settings.run_pod)
        self.poller = Poller(
            self.cache, observer.progress, self.queue.add, self.metrics,
            connections=settings.poll_connections, port_of=self.port_of,
        )  # fmt: skip
        self.parts = Parts(
            observer,
            Writer(api, self.cache, settings),
            Recorder(api, settings.holder),
            self.metrics,
            Limits(settings.node_lost_seconds, settings.ttl_seconds),
            settings.progress_seconds,
            self.poller.ask,
        )
        self.resync = Resync(api, self.cache, self.health, settings.namespaces or (None,), self.queue.add)

    def sight_changed(self, namespace: str, is_seen: bool) -> None:
        if not is_seen or namespace in self.health.lost:
            self.metrics.mark_refused(namespace, not is_seen)
        self.health.lost = self.sight.lost
        self.health.is_synced = not self.sight.waits
        if is_seen:
            # Of runs deleted meanwhile, only the metrics are left.
            for key in dict.fromkeys((*self.cache.keys_now(), *self.metrics.runs)):
                if namespace in (key[0], EVERYWHERE):
                    self.queue.add(key)

    def is_news(self, key: Key, uid: str, version: int) -> bool:
        """Whether a version is news, which our own writes are not. During a pass this is still undecided."""
        if self.queue.is_working(key):
            self.unread.setdefault(key, {})[uid] = version
            return False
        return not self.cache.is_known(uid, version)

    def read_again(self, key: Key) -> None:
        """Queues the run again after a pass, if a version arrived meanwhile that the pass did not write."""
        for uid, version in self.unread.pop(key, {}).items():
            if not self.cache.is_known(uid, version):
                self.queue.add(key)

    def port_of(self, key: Key) -> int | None:
        run = self.cache.run(key)
        return None if run is None else metrics_port_of(orjson.loads(run.body)["spec"])

    async def work(self, number: int) -> None:
        """One worker: handles one run after another, for ever."""
        while True:
            key = await self.queue.get()
            self.metrics.queue.set(len(self.queue))
            if not self.sight.sees(key[0]):
                # An unseen Job or pod would be created twice. The key is queued again once everything is listed.
                self.queue.done(key)
                self.read_again(key)
                continue
            began = time.monotonic()
            self.health.passes[number] = began
            try:
                if self.cache.run(key) is None or await self.claims.hold(key[0]):
                    wake = await reconcile(key, self.parts)
                else:
                    wake = CLAIM_SECONDS
            except ApiError as error:
                # 409 and 404 are normal: the object has changed since it was read.
                level = logging.DEBUG if error.status in (404, 409) else logging.WARNING
                self._retry(key, error, level, error.retry_after or 0.0)
            except NameTakenError as error:
                self._retry(key, error, logging.WARNING)
            except LeaseLostError:
                self.queue.failed(key)
            except Exception as error:
                _log.exception("a pass over %s/%s failed", *key)
                self._retry(key, error, logging.DEBUG)
            else:
                self.queue.done(key)
                if wake is not None:
                    self.queue.add_after(key, min(wake, self.longest_wait(key)))
            finally:
                self.read_again(key)
                self.health.passes.pop(number, None)
                self.metrics.reconcile.observe(time.monotonic() - began)

    def unended(self) -> list[Key]:
        """Runs that time alone may change."""
        return [key for key in self.cache.runs.keys_now() if not self._has_ended(key)]

    def longest_wait(self, key: Key) -> float:
        """The longest time between two looks, in seconds. By itself, an ended run only becomes due for deletion."""
        return ENDED_SECONDS if self._has_ended(key) else self.settings.resync_seconds

    def _has_ended(self, key: Key) -> bool:
        run = self.cache.run(key)
        return run is not None and has_ended(run)

    def _retry(self, key: Key, error: Exception, level: int, at_least: float = 0.0) -> None:
        self.metrics.errors.inc()
        delay = self.queue.failed(key, at_least)
        _log.log(level, "%s/%s: %s; again in %.1f s", *key, error, delay)

    async def check_cache(self) -> None:
        """Compares the cache with the API server, and the installed CRD with ours, for ever."""
        pause = FIRST_CHECK_SECONDS
        while True:
            await self.check_crd()
            await asyncio.sleep(pause)
            pause = max(CHECK_SECONDS, len(self.cache) / CHECKED_PER_SECOND)
            try:
                if not await self.resync.check():
                    # Only a second check tells updates still in transit from those that watching has missed.
                    pause = CHECK_SECONDS
                self.metrics.mark_event()
            except ApiError as error:
                _log.warning("the check of the cache failed: %s", error)
            self.metrics.current.set(0.0 if self.health.stalled_since is not None else 1.0)

    async def check_crd(self) -> None:
        found = await find_crd_problem(self.api)
        if found is None:
            return
        self.health.crd_problem, self.parts.writer.crd_lacks = found
        self.metrics.crd.set(1.0 if self.health.crd_problem else 0.0)
        if self.health.crd_problem:
            _log.error("%s", self.health.crd_problem)

    async def look_again(self) -> None:
        """Looks at every run that has not ended again now and then, spread evenly over the interval."""
        while True:
            seconds = max(self.settings.resync_seconds, len(self.unended()) / LOOKS_PER_SECOND)
            await asyncio.sleep(seconds)
            # List the runs again: most of the previous ones may have ended since.
            keys = self.unended()
            for index, key in enumerate(keys):
                self.queue.add_after(key, index * seconds / len(keys))

    async def keep_lease(self, stopping: asyncio.Event) -> None:
        """Renews the Lease until stopped or until it is lost."""
        try:
            await self.lease.keep(stopping)
        finally:
            self.health.is_leader = False
            self.metrics.leader.set(0.0)

    async def watch(self, stopping: asyncio.Event) -> None:
        flag = asyncio.Event()
        namespaces = self.settings.namespaces
        operating = asyncio.create_task(
            kopf.operator(
                registry=build_registry(
                    Intake(self.cache, self.is_news, self.queue.add, self.poller.ask_first, self.metrics.count_event),
                    self.sight,
                    self.queue.add,
                ),
                settings=build_kopf_settings(self.settings),
                clusterwide=not namespaces,
                namespaces=namespaces,
                standalone=True,
                stop_flag=flag,
            )
        )
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({operating, stop}, return_when=asyncio.FIRST_COMPLETED)
        flag.set()
        stop.cancel()
        await operating


async def run(settings: Settings, connect: Callable[..., Awaitable[Api]] = open_api) -> int:
    """Runs until a signal, or until the Lease is lost. Returns the exit code."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    api = await connect()
    operator = Operator(settings, api)
    api.observe = operator.metrics.count_request
    servers = await start_servers(operator.health, operator.metrics, settings.health_port, settings.metrics_port)
    try:
        await wait_for_api(api, stopping)
        await wait_for_crd(api, stopping)
        if not await operator.lease.acquire(stopping):
            return 0
        api.may_write = operator.lease.check
        operator.health.is_leader = True
        operator.metrics.leader.set(1.0)
        _log.info("Lease %s/%s is held by %s", settings.namespace, settings.lease_name, settings.holder)
        return await _operate(operator, stopping)
    finally:
        for server in servers:
            await server.cleanup()
        await api.close()


async def _operate(operator: Operator, stopping: asyncio.Event) -> int:
    settings = operator.settings
    helpers = [asyncio.create_task(operator.work(number)) for number in range(settings.workers)]
    helpers += [
        asyncio.create_task(task)
        for task in (
            operator.poller.run(settings.poll_seconds),
            operator.check_cache(),
            operator.look_again(),
            operator.claims.keep(lambda: [key[0] for key in operator.unended()]),
        )
    ]
    mains = [asyncio.create_task(operator.keep_lease(stopping)), asyncio.create_task(operator.watch(stopping))]
    code = 0
    try:
        done, _ = await asyncio.wait([*helpers, *mains], return_when=asyncio.FIRST_COMPLETED)
        stopping.set()
        for task in done:
            error = task.exception()
            if isinstance(error, LeaseLostError):
                _log.error("%s; this operator stops acting", error)
                code = EXIT_LEASE_LOST
            elif error is not None:
                _log.error("the operator cannot continue: %s: %s", type(error).__name__, error)
                code = 70
        for task in helpers:
            task.cancel()
        await asyncio.wait([*helpers, *mains], timeout=20)
    finally:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(operator.lease.release(), 3)
    return code


def main() -> None:
    """`python -m orbit_operator`."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print("orbit_operator: acts on OrbitRun objects. Settings are environment variables:\n")
        for field in fields(Settings):
            print(f"  {PREFIX}{field.name.upper()} ({field.default!r})")
        return
    try:
        settings = load_settings(os.environ)
    except OrbitError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    for noisy in ("kopf.objects", "kopf.activities", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    sys.exit(asyncio.run(run(settings)))
