"""The facts received by watching so far. A thousand runs must fit into 128 MiB together with the framework.

Belongs here: facts by run, updated in order of version. Does not belong here: filling the cache (`intake`), or
checking that watching keeps up (`resync`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from orbit_operator.facts import JobFacts, PodFacts

Key = tuple[str, str]
"""Namespace and name of a run."""
REMEMBERED = 4096
"""Number of deleted objects remembered, so that a late response does not bring them back."""


@dataclass(frozen=True, slots=True)
class Cached[T]:
    """One object, with the version at which it was seen."""

    value: T
    version: int


@dataclass(frozen=True, slots=True)
class RawRun:
    """An OrbitRun in as few bytes as possible: `body` is JSON without managed fields."""

    uid: str
    body: bytes
    version: str


@dataclass(frozen=True, slots=True)
class Child[T]:
    """A Job or pod and the uid of its run."""

    run_uid: str
    facts: T


class ObjectIndex[T]:
    """All objects of one kind, by uid and by the run to which they belong."""

    def __init__(self) -> None:
        self._by_uid: dict[str, tuple[Key, Cached[T]]] = {}
        self._by_run: dict[Key, dict[str, None]] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()

    def put(self, key: Key, uid: str, value: T, version: int) -> None:
        """Stores the object if it is newer; a deleted object stays deleted."""
        if uid in self._gone:
            return
        known = self._by_uid.get(uid)
        if known is not None and known[1].version > version:
            return
        self._by_uid[uid] = (key, Cached(value, version))
        self._by_run.setdefault(key, {})[uid] = None

    def drop(self, uid: str) -> Key | None:
        """Forgets an object; returns the key of its run."""
        self._gone[uid] = None
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
        known = self._by_uid.pop(uid, None)
        if known is None:
            return None
        key = known[0]
        uids = self._by_run[key]
        del uids[uid]
        if not uids:
            del self._by_run[key]
        return key

    def is_deleted(self, uid: str) -> bool:
        """Whether the object is known to have been deleted."""
        return uid in self._gone

    def of(self, key: Key) -> tuple[T, ...]:
        return tuple(self._by_uid[uid][1].value for uid in self._by_run.get(key, ()))

    def value(self, uid: str) -> T | None:
        known = self._by_uid.get(uid)
        return None if known is None else known[1].value

    def version(self, uid: str) -> int | None:
        known = self._by_uid.get(uid)
        return None if known is None else known[1].version

    def uids(self) -> dict[str, Key]:
        return {uid: key for uid, (key, _) in self._by_uid.items()}

    def keys_now(self) -> list[Key]:
        """Runs that have such objects now."""
        return list(self._by_run)

    def __len__(self) -> int:
        return len(self._by_uid)


class Cache:
    """Runs, Jobs and pods."""

    def __init__(self) -> None:
        self.runs: ObjectIndex[RawRun] = ObjectIndex()
        self.jobs: ObjectIndex[Child[JobFacts]] = ObjectIndex()
        self.pods: ObjectIndex[Child[PodFacts]] = ObjectIndex()
        self._with_children: set[str] = set()
        self._written: dict[str, int] = {}

    def put_written(self, key: Key, run: RawRun) -> None:
        """Stores the API server's response to our write, which was based on the version that we had read."""
        version = read_version(run.version)
        self._written[run.uid] = max(version, self._written.get(run.uid, 0))
        self.runs.put(key, run.uid, run, version)

    def is_known(self, run_uid: str, version: int) -> bool:
        """Whether everything in this version of a run was read or written by us."""
        return version <= self._written.get(run_uid, 0)

    def put_job(self, key: Key, job: Child[JobFacts], version: int) -> None:
        self._note_child(job.run_uid)
        self.jobs.put(key, job.facts.uid, job, version)

    def put_pod(self, key: Key, pod: Child[PodFacts], version: int) -> None:
        self._note_child(pod.run_uid)
        self.pods.put(key, pod.facts.uid, pod, version)

    def _note_child(self, run_uid: str) -> None:
        # A run's pods usually outlive it; noted then, the run would never be forgotten.
        if not self.runs.is_deleted(run_uid):
            self._with_children.add(run_uid)

    def had_children(self, run_uid: str) -> bool:
        """Whether any Job or pod of this run was ever seen, including one that is gone."""
        return run_uid in self._with_children

    def forget_run(self, run_uid: str) -> None:
        self._with_children.discard(run_uid)
        self._written.pop(run_uid, None)

    def keys_now(self) -> list[Key]:
        """Keys of all current runs, followed by those of runs of which only Jobs or pods are left."""
        shelves = (self.runs, self.jobs, self.pods)
        return list(dict.fromkeys(key for shelf in shelves for key in shelf.keys_now()))

    def __len__(self) -> int:
        return len(self.runs) + len(self.jobs) + len(self.pods)

    def run(self, key: Key) -> RawRun | None:
        """The newest run of that name: a deleted run may still be visible together with its successor."""
        found = self.runs.of(key)
        return max(found, key=lambda run: read_version(run.version), default=None)


def read_version(text: object) -> int:
    """A version as a number. Versions of one kind grow; text that is not a number is accepted in any order."""
    return int(text) if isinstance(text, str) and text.isdecimal() else 0
