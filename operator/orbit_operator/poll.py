"""Polls the pods: `GET /status` of every live attempt, a few at a time, each with a short time limit.

Belongs here: HTTP to pods, and reading an answer that may be anything. Does not belong here: acting on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import aiohttp
import orjson

from orbit_operator.attempts import newest_pod
from orbit_operator.cache import Cache, Key
from orbit_operator.facts import PodFacts, Progress
from orbit_operator.metrics import Metrics
from orbit_operator.reported_values import read_count, read_number, read_seconds, read_text

ANSWER_SECONDS = 3.0
LARGEST_ANSWER = 64 * 1024
POLLS_PER_SECOND, POLLS_AT_ONCE = 10.0, 50
"""Limits for all pods together, so with many pods each is polled less often. More at once would delay passes over other
runs; one at a time would spend twice as much on waking up as on polling."""


class Poller:
    """Polls in rounds. Stores reports in `progress`, and calls `changed` with the key of their run."""

    def __init__(
        self,
        cache: Cache,
        progress: dict[Key, Progress],
        changed: Callable[[Key], None],
        metrics: Metrics,
        *,
        connections: int,
        port_of: Callable[[Key], int | None],
    ) -> None:
        self._cache = cache
        self._progress = progress
        self._changed = changed
        self._metrics = metrics
        self._places = asyncio.Semaphore(connections)
        self._port_of = port_of
        self._first: dict[Key, None] = {}
        self._asked: dict[Key, float] = {}
        self._session: aiohttp.ClientSession | None = None

    def ask_first(self, key: Key) -> None:
        """Moves a run up: its pod has changed and may now answer. With thousands, its turn would be minutes away."""
        self._first[key] = None

    async def ask(self, key: Key) -> None:
        """Polls a run's pod at once, ahead of all others: what happens to the pod depends on its answer."""
        target = self._target(key)
        if target is not None:
            await self._ask(key, *target)

    async def run(self, seconds: float) -> None:
        """Polls for ever. A round takes at least `seconds`, and longer if there are many pods."""
        limit = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
        async with aiohttp.ClientSession(
            timeout=limit, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            self._session = session
            while True:
                began = time.monotonic()
                await self.round()
                await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))

    async def round(self) -> int:
        """Polls every live pod once, no faster than the limit; returns the number of pods."""
        asked = 0
        async with asyncio.TaskGroup() as group:
            for key in self._keys():
                await self._places.acquire()
                # Look up the pod as late as possible: a round over thousands takes minutes, and a pod may be replaced.
                target = self._target(key)
                self._asked[key] = time.monotonic()
                if target is None:
                    self._places.release()
                    continue
                group.create_task(self._ask(key, *target)).add_done_callback(lambda _: self._places.release())
                asked += 1
                if asked % POLLS_AT_ONCE == 0:
                    await asyncio.sleep(POLLS_AT_ONCE / POLLS_PER_SECOND)
        return asked

    def _keys(self) -> Iterator[Key]:
        """Runs in order of polling: least recently polled first, with one that has changed after each."""
        began, keys = time.monotonic(), self._cache.pods.keys_now()
        self._asked = {key: self._asked[key] for key in keys if key in self._asked}
        for key in sorted(keys, key=lambda key: self._asked.get(key, 0.0)):
            if self._asked.get(key, 0.0) < began:
                yield key
            yield from self._pop_first(1)
        yield from self._pop_first(len(self._first))

    def _pop_first(self, most: int) -> Iterator[Key]:
        for key in list(islice(self._first, most)):
            del self._first[key]
            yield key

    def _target(self, key: Key) -> tuple[PodFacts, int] | None:
        """The pod that represents a run, and its port."""
        run = self._cache.run(key)
        own = [child.facts for child in self._cache.pods.of(key) if run is not None and child.run_uid == run.uid]
        # Only the newest pod: one left behind on a lost node may still answer, but no longer represents the run.
        # Pods of ranks never do, however new they are.
        pod = newest_pod([each for each in own if each.attempt > 0])
        if pod is None or not pod.ip or not pod.started or pod.is_terminal:
            return None
        port = self._port_of(key)
        return None if port is None else (pod, port)

    async def _ask(self, key: Key, pod: PodFacts, port: int) -> None:
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        answer, outcome = await self._fetch(f"http://{host}:{port}/status")
        heard = read_progress(answer, key[1], pod.uid, time.time())
        self._metrics.polls.labels("refused" if outcome == "answered" and heard is None else outcome).inc()
        if heard is None:
            return
        known = self._progress.get(key)
        if known is not None and known.pod_uid == pod.uid and known.step > heard.step:
            return  # A pod never forgets: an answer that says less than before is ignored.
        if known is not None and replace(heard, at=known.at) == known:
            return
        self._progress[key] = heard
        self._changed(key)

    async def _fetch(self, url: str) -> tuple[Any, str]:
        assert self._session is not None
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status != 200:
                    return None, "refused"
                data = b""
                async for chunk in response.content.iter_chunked(16 * 1024):
                    data += chunk
                    if len(data) > LARGEST_ANSWER:
                        return None, "flooded"
            return orjson.loads(data), "answered"
        except TimeoutError:
            return None, "timeout"
        except (aiohttp.ClientError, OSError):
            return None, "unreachable"
        except orjson.JSONDecodeError:
            return None, "refused"


def read_progress(answer: Any, run: str, pod_uid: str, now: float) -> Progress | None:
    """The plausible parts of an answer; `None` if it is from another run."""
    if not isinstance(answer, Mapping) or answer.get("run") != run:
        return None
    best = answer.get("best")
    best = best if isinstance(best, Mapping) else {}
    return Progress(
        at=now,
        pod_uid=pod_uid,
        phase=read_text(answer, "phase", 32) or "",
        step=read_count(answer, "step") or 0,
        total=read_count(answer, "total"),
        reward=read_number(answer, "reward"),
        parity=read_number(answer, "parity"),
        parity_limit=read_number(answer, "parity_limit"),
        policy_version=read_count(answer, "policy_version"),
        adapter_digest=read_text(answer, "adapter_digest", 128),
        checkpoint=read_text(answer, "last_checkpoint", 1024),
        checkpoint_step=read_count(answer, "last_checkpoint_step"),
        best_step=read_count(best, "step"),
        best_value=read_number(best, "value"),
        best_evaluation=read_text(best, "evaluation", 63),
        tokens_per_second=read_number(answer, "tokens_per_second"),
        eta_seconds=read_seconds(answer, "eta_seconds"),
        resumed_from=read_count(answer, "resumed_from_step"),
        execution=read_count(answer, "execution"),
        is_live=answer.get("live") is not False,
        message=read_text(answer, "reason", 512) or "",
    )
