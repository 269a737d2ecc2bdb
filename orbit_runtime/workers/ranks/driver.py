"""The process that talks to Ray for a run: creates the ranks, calls them, and observes how they fail.

Belongs here: Ray's driver and its loop over calls. Does not belong here: what a failure means (`verdict`, in the run),
or ending all processes (`guard`, above this one).

If Ray's head or node agent is lost, Ray ends its driver's process without an exception that could be caught. Hence this
separate process: the run's own survives and reports what happened.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from orbit_runtime.errors import CollectiveError, OrbitError, UnsupportedError
from orbit_runtime.workers.child.process import end_all, end_with_parent
from orbit_runtime.workers.ranks.evidence import Ending, NodeWatch, ProgressSign, RankEnd, RankEvidence
from orbit_runtime.workers.ranks.node import HOST, RESOURCE, JoinedRay, PrivateRay, port_block, set_environment
from orbit_runtime.workers.ranks.rank import RankActor, RankFacts, RankFailure, RankOrder

TICK = 0.25
ROOM_SECONDS, NODES_SECONDS = 60.0, 900.0
"""Seconds to wait for a placement group: with all nodes there, and with some still to be started."""
SETTLE_SECONDS = 3.0
"""Wait after the first failure: others are on their way, and one of them may be the cause."""
ASK_SECONDS = 10.0
SIGN_SECONDS = 5.0
"""Between two signs of life that go to the run."""
STARTS = 2


@dataclass(frozen=True)
class Start:
    """The arguments of a driver."""

    order: RankOrder
    logs: str
    scratch: str
    address: str | None
    nodes: int
    """Number of nodes with ranks, not counting this one if there is an `address`."""
    ports: tuple[int, int] | None
    stopped_seconds: float


class Driver:
    """The driver of one group."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._order = start.order
        self._private: PrivateRay | None = None
        self._joined: JoinedRay | None = None
        self._facts: dict[int, RankFacts] = {}
        self._actors: list[Any] = []
        self._watches: dict[str, Any] = {}

    # --- start ---

    def start(self) -> RankEvidence | list[bytes]:
        """Evidence if a rank cannot be made, else each rank's pickled None."""
        import ray

        order = self._order
        if self._start.address is None:
            self._private = self._start_private()
        else:
            self._joined = self._join(self._start.address)
        ray.init(
            address=self._private.address if self._private else self._start.address,
            log_to_driver=False, logging_level=logging.ERROR, configure_logging=False,
            _node_ip_address=HOST if self._private else None,
        )  # fmt: skip
        group = self._place()
        bundles = neighbours_together(ray.util.placement_group_table(group)["bundles_to_node_id"])
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._actors = [
            ray.remote(RankActor).options(
                max_restarts=0,
                runtime_env=None if self._private else {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
                **self._share(),
            ).remote(rank, self._start.logs)
            for rank, bundle in enumerate(bundles)
        ]  # fmt: skip
        introduced = self._collect("start", [each.introduce.remote() for each in self._actors], None)
        if isinstance(introduced, RankEvidence):
            return introduced
        self._facts = {each.rank: each for each in introduced}
        self._watch_nodes()
        master = (introduced[0].node, introduced[0].port)
        # In a cluster that is not ours, Ray decides which GPU a rank gets.
        packed = ray.put(pickle.dumps(order if self._private else replace(order, devices=None)))
        return self._collect("start", [each.build.remote(packed, master) for each in self._actors], None)

    def _start_private(self) -> PrivateRay:
        count, scratch = self._order.count, Path(self._start.scratch)

        def start() -> PrivateRay:
            ports, self._lock = (self._start.ports, -1) if self._start.ports else port_block(count)
            return PrivateRay(scratch, count, ports)

        return _patiently(start)

    def _join(self, address: str) -> JoinedRay:
        return _patiently(lambda: JoinedRay(address, Path(self._start.scratch), NODES_SECONDS))

    def _share(self) -> dict[str, Any]:
        """One rank's share of a node."""
        if self._private:
            return {"num_cpus": 0, "resources": {RESOURCE: 1}}
        return {"num_cpus": 0, "num_gpus": 1} if self._order.devices is not None else {"num_cpus": 1}

    def _place(self) -> Any:
        """Creates one placement group for the run."""
        import ray

        names = {"num_gpus": "GPU", "num_cpus": "CPU"}
        share = self._share()
        bundle = share.get("resources") or {names[key]: value for key, value in share.items() if value}
        strategy = "STRICT_PACK" if self._start.nodes == 1 else "PACK"
        group = ray.util.placement_group([dict(bundle) for _ in range(self._order.count)], strategy=strategy)
        began = complete = time.monotonic()
        while not group.wait(5):
            now = time.monotonic()
            nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
            found = [each for each in nodes if each["Alive"] and bundle.keys() <= each["Resources"].keys()]
            if len(found) < self._start.nodes:
                complete = now
            if now > began + NODES_SECONDS and complete == now:
                raise CollectiveError(
                    f"{len(found)} of {self._start.nodes} nodes for ranks joined the Ray cluster within "
                    f"{NODES_SECONDS:.0f} s",
                    where="spec.placement.nodes",
                    fix="see why the others do not start, or write fewer",
                )
            if now > complete + ROOM_SECONDS:
                raise UnsupportedError(
                    f"the Ray cluster has no room for {self._order.count} ranks with {bundle} each"
                    + (" on one node" if strategy == "STRICT_PACK" else f" on {len(found)} nodes"),
                    where="spec.placement",
                    fix="free some of it, or ask for fewer ranks (spec.training.parallel)",
                )
        return group

    def _watch_nodes(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._here = NodeWatch(self._start.logs)
        if self._private:
            return
        by_actor = ray.get([each.introduce_node.remote() for each in self._actors], timeout=ASK_SECONDS)
        for node in sorted(set(by_actor)):
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            watch = ray.remote(NodeWatch).options(num_cpus=0, scheduling_strategy=where).remote(self._start.logs)
            for rank, of in enumerate(by_actor):
                if of == node:
                    self._watches.setdefault(node, (watch, []))[1].append(rank)

    # --- calls ---

    def call(
        self, method: str, arguments: bytes, patience: float | None, tell: Callable[[], None]
    ) -> RankEvidence | list[bytes]:
        """Results in the order of ranks, or evidence if a rank has none.

        Args: tell: called now and then while ranks make progress.
        """
        import ray

        packed = ray.put(arguments)
        return self._collect(method, [each.run.remote(method, packed) for each in self._actors], patience, tell)

    def _collect(
        self, method: str, calls: list[Any], patience: float | None, tell: Callable[[], None] = lambda: None
    ) -> RankEvidence | list[Any]:
        import ray
        from ray.exceptions import RayError

        rank_of = {call: rank for rank, call in enumerate(calls)}
        pending, results, said = list(calls), {}, {}
        watch = _Patience(patience, self._start.stopped_seconds, tell)
        failed_at: float | None = None
        gave_up, stopped = False, tuple[int, ...]()
        while pending and not gave_up:
            ready, pending = ray.wait(pending, num_returns=1, timeout=TICK)
            for call in ready:
                try:
                    results[rank_of[call]] = ray.get(call)
                except RayError as error:
                    said[rank_of[call]] = str(error)
                watch.progress()
            lost = self._private.death() if self._private else None
            if lost is not None:
                return RankEvidence(method, self._ends(results, said, rank_of, pending), lost=lost)
            if said or any(isinstance(each, RankFailure) for each in results.values()):
                failed_at = failed_at or time.monotonic()
                gave_up = time.monotonic() > failed_at + SETTLE_SECONDS
            elif self._facts and not ready:
                gave_up = watch.look(self._ask("glance"), {rank_of[call] for call in pending})
                stopped = watch.stopped
        if failed_at is None and not gave_up:
            return [results[rank] for rank in range(len(calls))]
        given = patience if gave_up and failed_at is None else None
        ends = self._ends(results, said, rank_of, pending)
        return RankEvidence(method, ends, patience=given, stopped=stopped)

    def _ends(
        self, results: Mapping[int, Any], said: Mapping[int, str], rank_of: Any, pending: Any
    ) -> tuple[RankEnd, ...]:
        seen = self._ask("look_back") if self._facts else {}
        waiting = {rank_of[call] for call in pending}
        ends = []
        for rank in sorted(rank_of.values()):
            result = results.get(rank)
            failure = result if isinstance(result, RankFailure) else None
            ending: Ending = "pending" if rank in waiting else "done"
            if failure or rank in said:
                ending = "failed" if failure else "lost"
            node = self._facts[rank].node if rank in self._facts else ""
            device = self._order.device(rank)
            ends.append(RankEnd(rank, device, node, ending, seen.get(rank), failure, said.get(rank, "")))
        return tuple(ends)

    # --- from outside ---

    def _pids(self, ranks: Any = None) -> dict[int, int]:
        return {rank: facts.pid for rank, facts in self._facts.items() if ranks is None or rank in ranks}

    def _ask(self, question: str) -> dict[int, Any]:
        """Asks every node; omits the ranks of a node that does not answer."""
        if self._private:
            here: dict[int, Any] = getattr(self._here, question)(self._pids())
            return here
        import ray
        from ray.exceptions import RayError

        found: dict[int, Any] = {}
        for watch, ranks in self._watches.values():
            try:
                found |= ray.get(getattr(watch, question).remote(self._pids(ranks)), timeout=ASK_SECONDS)
            except RayError:
                continue
        return found

    def close(self) -> None:
        """Ends our processes in a cluster that is not ours. A private one ends with its guard."""
        if self._private:
            return
        import ray
        from ray.exceptions import RayError

        for watch, ranks in self._watches.values():
            try:
                ray.get(watch.kill.remote(list(self._pids(ranks).values())), timeout=ASK_SECONDS)
            except RayError:
                continue
        ray.shutdown()


def neighbours_together(node_of: Mapping[int, str]) -> list[int]:
    """The bundle of each rank, such that consecutive ranks, which exchange most, share a node.

    Example: `neighbours_together({0: "a", 1: "b", 2: "a", 3: "b"}) == [0, 2, 1, 3]`
    """
    by_node: dict[str, list[int]] = {}
    for index in sorted(node_of):
        by_node.setdefault(node_of[index], []).append(index)
    return [index for bundles in by_node.values() for index in bundles]


def _patiently[R](start: Callable[[], R]) -> R:
    """Tries a second time if a Ray daemon is lost during its start, or finds a port taken meanwhile."""
    for turn in range(STARTS):
        try:
            return start()
        except OrbitError:
            raise
        except Exception:
            end_all(os.getpid())
            if turn == STARTS - 1:
                raise
    raise AssertionError


class _Patience:
    """Decides when to give up a call that does not end."""

    def __init__(
        self,
        seconds: float | None,
        stopped_seconds: float,
        tell: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args: tell: called when there is progress, at most every `SIGN_SECONDS`."""
        self._seconds = seconds
        self._stopped_seconds = stopped_seconds
        self._tell = tell
        self._clock = clock
        self._told = -math.inf
        self._progressed = self._clock()
        self._counts: dict[int, int] = {}
        self._stopped_since: dict[int, float] = {}
        self.stopped: tuple[int, ...] = ()

    def progress(self) -> None:
        self._progressed = self._clock()
        if self._progressed >= self._told + SIGN_SECONDS:
            self._told = self._progressed
            self._tell()

    def look(self, glances: Mapping[int, Any], pending: set[int]) -> bool:
        """Whether to give up: no rank has written a note for too long, or one is stopped."""
        now = self._clock()
        counts = {rank: each.note.count for rank, each in glances.items()}
        if counts != self._counts:
            self._counts = counts
            self.progress()
        halted = {rank for rank, each in glances.items() if rank in pending and each.state == "T"}
        self._stopped_since = {rank: self._stopped_since.get(rank, now) for rank in halted}
        self.stopped = tuple(
            sorted(rank for rank, since in self._stopped_since.items() if now > since + self._stopped_seconds)
        )
        return bool(self.stopped) or (self._seconds is not None and now > self._progressed + self._seconds)


def main(descriptor: int, parent: int) -> int:
    """Serves one group over the connection; returns when it closes."""
    end_with_parent(parent)
    connection = Connection(descriptor)
    start: Start = connection.recv()
    if start.address is None:
        set_environment(os.environ)
    tempfile.tempdir = start.scratch
    os.environ.update(TMPDIR=start.scratch)
    driver = Driver(start)

    def tell() -> None:
        connection.send(ProgressSign())

    try:
        connection.send(_guarded(driver.start))
        while True:
            method, patience = connection.recv()
            arguments = connection.recv_bytes()
            connection.send(_guarded(lambda m=method, a=arguments, p=patience: driver.call(m, a, p, tell)))
    except EOFError:
        return 0
    finally:
        driver.close()
        shutil.rmtree(start.scratch, ignore_errors=True)


def _guarded(work: Any) -> Any:
    """The result of `work`; an Orbit error as itself, any other as the error of a failing cluster."""
    try:
        return work()
    except OrbitError as error:
        return (type(error).__name__, error.message, error.where, error.fix)
    except Exception as error:
        return (CollectiveError.__name__, f"Ray failed: {type(error).__name__}: {str(error)[:500]}", None, None)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), os.getppid()))
