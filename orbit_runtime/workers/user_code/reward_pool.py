"""Rewards in long-lived worker processes: a call that hangs or dies costs only itself.

Belongs here: dispatch, per-call timeouts, restarts. Does not belong here: what a reward computes, or how scores
combine.

One thread of this process owns every worker: it starts them (Linux ties their lives to that thread), feeds them, reads
results and kills workers that exceed their time, so scoring goes on while the caller generates.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import queue
import selectors
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, get_args

from orbit_runtime.errors import InternalError, ManifestError, OrbitError, RewardsFailingError
from orbit_runtime.workers.child.process import (
    OutputRelay,
    Seal,
    Stacks,
    describe_exit,
    end_guarded,
    frame,
    import_path,
    start_module,
    thread_stack,
)
from orbit_runtime.workers.system import ClosedAtEnd, usable_cores
from orbit_runtime.workers.user_code.entrypoints import TargetError
from orbit_runtime.workers.user_code.reward_protocol import (
    MAX_FAILURES_KEPT,
    RewardCall,
    RewardFailure,
    RewardOutcome,
    RewardResult,
    RewardTarget,
    build_failure,
    call_reward,
    check_callable,
)

READ_SIZE = 1 << 16
MAX_MESSAGE = 1 << 24
"""Bytes; a result is a number and a sentence."""
WORKER_MODULE = "orbit_runtime.workers.user_code.reward_worker"
CHUNK_SECONDS = 0.005
"""Work sent to a worker at a time: enough to hide a round trip, and little enough to keep the workers balanced."""
FIRST_CHUNK, MAX_CHUNK = 8, 64
TAKE_SECONDS = 30.0
"""Time that an idle worker may need to take its calls, in addition to the first call's own limit."""
OUTPUT_BYTES = 1 << 20
"""Limit for the output of all rewards of a run that is passed to standard error; the rest is dropped."""
MAX_IDLE_DEATHS = 3
"""Consecutive deaths of workers that run no call, after which the pool gives up."""


class RewardProcess:
    """Starts at once. The parent's pipe ends are non-blocking, and apart from ending, no method waits.

    Args:
        variables: see `child_environment`.
        output_fd: takes what the worker, and what it starts, prints.
    """

    def __init__(self, head: Mapping[str, Any], variables: Iterable[str], *, now: float, output_fd: int) -> None:
        calls_read, self.calls_fd = os.pipe()
        self.results_fd, results_write = os.pipe()
        self._stacks = Stacks()
        theirs = (calls_read, results_write, self._stacks.fd)
        try:
            self._process = start_module(
                WORKER_MODULE, *theirs, os.getpid(), variables=variables, pass_fds=theirs,
                stdin=subprocess.DEVNULL, stdout=output_fd, stderr=output_fd,
            )  # fmt: skip
        finally:
            os.close(calls_read)
            os.close(results_write)
        os.set_blocking(self.calls_fd, False)
        os.set_blocking(self.results_fd, False)
        self._inbox = b""
        self._outbox = bytearray()
        self._is_closed = False
        self.is_ready = False
        self.in_flight: deque[Any] = deque()
        """The pool's identifiers of calls sent and not answered; the first one is running."""
        self.has_taken = False
        """Whether it confirmed the last chunk sent."""
        self.progress_at = now
        """When the running call started, as far as the parent can tell."""
        self._seal = Seal()
        self.send({**head, "key": self._seal.key})

    @property
    def wants_write(self) -> bool:
        return bool(self._outbox)

    def send(self, message: Any) -> None:
        self._outbox += frame(json.dumps(message).encode())
        self.flush()

    def flush(self) -> None:
        """Writes as much as the pipe takes. A closed pipe is detected by `receive`."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._outbox:
                del self._outbox[: os.write(self.calls_fd, self._outbox)]

    def receive(self) -> tuple[Iterator[Any], bool]:
        """Complete messages that arrived, and whether the worker still holds its end open. What the worker has not
        written itself is a `ValueError` in its turn: a reward can find the pipe, and write to it."""
        is_open = True
        while len(self._inbox) <= MAX_MESSAGE:
            try:
                data = os.read(self.results_fd, READ_SIZE)
            except BlockingIOError:
                break
            if not data:
                is_open = False
                break
            self._inbox += data
        *lines, self._inbox = self._inbox.split(b"\n")
        if len(self._inbox) > MAX_MESSAGE:
            lines, self._inbox = [*lines, b"longer than any message"], b""
        return (json.loads(self._seal.open(line)) for line in lines), is_open

    def stack(self) -> str:
        """The worker's stacks, taken before it is ended."""
        return self._stacks.ask(self._process.pid)

    def end(self) -> str:
        """Kills the worker and all that it started, and returns how the worker ended. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            end_guarded(self._process)
            os.close(self.calls_fd)
            os.close(self.results_fd)
            self._stacks.close()
        return f"the worker {describe_exit(self._process.wait())}"

    def exit_reason(self) -> str:
        """How a worker that closed its pipe ended by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)  # before `end`, whose signal would hide the true cause
        return self.end()


@dataclass(eq=False)
class _Submission:
    """Calls that were submitted together."""

    calls: Sequence[RewardCall]
    future: Future[list[RewardResult]] = field(default_factory=Future)
    results: list[RewardResult | None] = field(init=False)
    unanswered: int = field(init=False)

    def __post_init__(self) -> None:
        self.results, self.unanswered = [None] * len(self.calls), len(self.calls)
        self.future.set_running_or_notify_cancel()


_Place = tuple[_Submission, int]
"""A call: its submission, and its index there."""


class RewardPool(ClosedAtEnd):
    """`num_workers` processes that each hold every reward.

    Args:
        targets: rewards whose `target` is a dotted path.
        search_path: folders to import entry points from first, such as the working folder and the manifest's.
        start_seconds: limit for importing all rewards.

    Raises:
        ManifestError: an entry point cannot be imported or called with its arguments.
    """

    def __init__(
        self,
        targets: Sequence[RewardTarget],
        *,
        num_workers: int | None = None,
        search_path: Sequence[str] = (),
        start_seconds: float = 120.0,
    ) -> None:
        rewards = [
            (target.name, target.target, target.arguments) for target in targets if isinstance(target.target, str)
        ]
        assert len(rewards) == len(targets), "callables run in-process, see reward_threads"
        self._head = {
            "path": import_path(search_path),
            "rewards": [[name, target, dict(arguments)] for name, target, arguments in rewards],
        }
        """The first message to a worker: where to import from (including the parent's own path) and what to load."""
        self._targets = {target.name: target for target in targets}
        self._num_workers = num_workers or default_workers()
        self._start_seconds = start_seconds

        self._changed = threading.Condition()
        """Guards every field below that both threads use; notified while workers start."""
        self._pending: deque[_Place] = deque()
        self._open: set[_Submission] = set()
        """Submissions not answered yet."""
        self._num_ready = 0
        self._failure: OrbitError | None = None
        self._is_closing = False
        self._failures: list[RewardFailure] = []

        self._workers: list[RewardProcess] = []
        self._call_seconds: float | None = None
        self._idle_deaths = 0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._wake_read, selectors.EVENT_READ)
        self._printed = OutputRelay("rewards", OUTPUT_BYTES)
        self._output_read, self._output_write = os.pipe()
        os.set_blocking(self._output_read, False)
        self._ready.register(self._output_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="reward-pool", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._num_ready >= self._num_workers or self._failure is not None)
        if self._failure is not None:
            self.close()
            raise self._failure

    @property
    def failures(self) -> Sequence[RewardFailure]:
        """The first timeouts and crashes, at most twenty."""
        return tuple(self._failures)

    def submit(self, calls: Sequence[RewardCall]) -> Future[list[RewardResult]]:
        """Starts scoring and returns at once.

        The future's errors:
            ManifestError: a restarted worker can no longer import a reward.
            RewardsFailingError: workers keep dying while they run no call.
        """
        assert not self._is_closing, "the pool is closed"
        submission = _Submission(tuple(calls))
        if not calls:
            submission.future.set_result([])
            return submission.future
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._open.add(submission)
            self._pending.extend((submission, index) for index in range(len(calls)))
        os.write(self._wake_write, b"w")
        return submission.future

    def score(self, calls: Sequence[RewardCall]) -> list[RewardResult]:
        """Submits the calls and waits for the results."""
        return self.submit(calls).result()

    def close(self) -> None:
        """Ends every worker. Safe to call twice."""
        if self._is_closing:
            return
        with self._changed:
            self._is_closing = True
        os.write(self._wake_write, b"w")
        self._thread.join()
        self._ready.close()
        for fd in (self._wake_read, self._wake_write, self._output_read, self._output_write):
            os.close(fd)

    # Everything below runs in the pool's thread.

    def _serve(self) -> None:
        try:
            self._workers = [self._start() for _ in range(self._num_workers)]
            while not self._is_closing and self._failure is None:
                self._wait()
                with self._changed:
                    for place, worker in enumerate(self._workers):
                        self._attend(place, worker)
                    for worker in self._workers:
                        self._feed(worker)
                    if self._failure is not None:
                        self._changed.notify_all()
        except Exception as error:  # the waiting thread must learn of it
            with self._changed:
                self._failure = InternalError(f"the reward pool failed: {type(error).__name__}: {error}")
                self._failure.__cause__ = error
                self._changed.notify_all()
        finally:
            for worker in self._workers:
                worker.end()
            self._pass_on()
            self._end_open()

    def _pass_on(self) -> None:
        """Passes on the workers' new output, also of those that have ended."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output_read, 1 << 16):
                self._printed.pass_on(data)
                if len(data) < 1 << 16:
                    return

    def _end_open(self) -> None:
        """Fails all open submissions: no worker will answer them."""
        with self._changed:
            left, self._open = self._open, set()
            self._pending.clear()
        for submission in left:
            submission.future.set_exception(self._failure or CancelledError())

    def _start(self) -> RewardProcess:
        variables = {name for target in self._targets.values() for name in target.variables}
        worker = RewardProcess(self._head, variables, now=time.monotonic(), output_fd=self._output_write)
        self._ready.register(worker.results_fd, selectors.EVENT_READ)
        return worker

    def _forget(self, worker: RewardProcess) -> None:
        """Must be called before its pipes are closed, because the next worker's may reuse their numbers."""
        self._ready.unregister(worker.results_fd)
        if worker.calls_fd in self._ready.get_map():
            self._ready.unregister(worker.calls_fd)

    def _wait(self) -> None:
        """Sleeps until a pipe is ready or the next deadline passes."""
        deadlines = [deadline for worker in self._workers if (deadline := self._deadline(worker)) is not None]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for worker in self._workers:
            if worker.wants_write != (worker.calls_fd in self._ready.get_map()):
                if worker.wants_write:
                    self._ready.register(worker.calls_fd, selectors.EVENT_WRITE)
                else:
                    self._ready.unregister(worker.calls_fd)
        ready = self._ready.select(timeout)
        if any(key.fd == self._wake_read for key, _ in ready):
            os.read(self._wake_read, 1 << 16)
        if any(key.fd == self._output_read for key, _ in ready):
            self._pass_on()

    def _deadline(self, worker: RewardProcess) -> float | None:
        if not worker.is_ready:
            return worker.progress_at + self._start_seconds
        if not worker.in_flight:
            return None
        allowed = self._targets[_call(worker.in_flight[0]).reward].timeout_seconds
        return worker.progress_at + allowed + (0.0 if worker.has_taken else TAKE_SECONDS)

    def _attend(self, place: int, worker: RewardProcess) -> None:
        """Takes a worker's messages; replaces it if it died or exceeded its time."""
        worker.flush()
        messages, is_open = worker.receive()
        try:
            for message in messages:
                self._handle(worker, message)
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
            self._forget(worker)
            worker.end()
            self._replace(place, worker, "crash", "it wrote to its worker's pipe of results; the worker was killed")
            return
        if self._failure is not None:
            return
        deadline = self._deadline(worker)
        if not is_open:
            self._forget(worker)
            self._replace(place, worker, "crash", worker.exit_reason())
        elif deadline is not None and time.monotonic() >= deadline:
            if not worker.is_ready:
                self._failure = ManifestError(
                    f"importing the rewards took longer than {self._start_seconds:g} s",
                    where="spec.environment.rewards",
                    fix="do slow work on the first call, not on import",
                )
                return
            self._forget(worker)
            # Only for the first failures: asking takes a moment, during which the other workers wait.
            stack = worker.stack() if len(self._failures) < MAX_FAILURES_KEPT else ""
            worker.end()
            seconds = self._targets[_call(worker.in_flight[0]).reward].timeout_seconds
            self._replace(place, worker, "timeout", f"no result within {seconds:g} s; the worker was killed", stack)

    def _handle(self, worker: RewardProcess, message: Any) -> None:
        worker.progress_at = time.monotonic()
        if isinstance(message, dict):
            if worker.is_ready and ("taken" not in message or worker.has_taken):
                raise ValueError("said once")
            if "error" in message:
                problem = message["error"]
                self._failure = ManifestError(
                    problem["message"],
                    where=f"spec.environment.rewards[{problem['reward']}]",
                    fix="name an importable 'module:function' that takes (completion, prompt, fields, **arguments)",
                )
            elif "taken" in message:
                worker.has_taken = True
            else:
                worker.is_ready = True
                self._num_ready += 1
                self._changed.notify_all()
            return
        outcome, value, reason, seconds = message
        is_scored = outcome in ("value", "wrong")
        if outcome not in get_args(RewardOutcome) or (value is not None) != is_scored:
            raise ValueError("no result")
        result = RewardResult(outcome, float(value) if is_scored else None, str(reason), float(seconds))
        if not math.isfinite(result.value or 0.0) or not worker.in_flight:
            raise ValueError("no result of a call")
        self._idle_deaths = 0
        self._call_seconds = (
            result.seconds if self._call_seconds is None else 0.9 * self._call_seconds + 0.1 * result.seconds
        )
        self._answer(worker.in_flight.popleft(), result)

    def _replace(self, at: int, worker: RewardProcess, outcome: str, reason: str, stack: str = "") -> None:
        """Answers the call that was running, requeues the others, and starts a new worker."""
        if worker.in_flight:
            hit = worker.in_flight.popleft()
            self._answer(hit, RewardResult("timeout" if outcome == "timeout" else "crash", None, reason, stack=stack))
            self._pending.extendleft(reversed(worker.in_flight))
        else:
            self._idle_deaths += 1
            if self._idle_deaths >= MAX_IDLE_DEATHS:
                self._failure = RewardsFailingError(
                    f"reward workers keep ending while they score nothing: {reason}",
                    where="spec.environment.rewards",
                    fix="look for threads, signals or memory limits that end the process",
                )
                return
        self._workers[at] = self._start()

    def _answer(self, place: _Place, result: RewardResult) -> None:
        submission, index = place
        submission.results[index] = result
        submission.unanswered -= 1
        if result.value is None and len(self._failures) < MAX_FAILURES_KEPT:
            self._failures.append(build_failure(submission.calls[index], result))
        if not submission.unanswered:
            self._open.discard(submission)
            submission.future.set_result([each for each in submission.results if each is not None])

    def _feed(self, worker: RewardProcess) -> None:
        if not worker.is_ready or worker.in_flight or not self._pending:
            return
        size = FIRST_CHUNK if self._call_seconds is None else int(CHUNK_SECONDS / max(self._call_seconds, 1e-9))
        share = -(-len(self._pending) // self._num_workers)
        chunk = [self._pending.popleft() for _ in range(max(1, min(size, MAX_CHUNK, share)))]
        calls = [_call(place) for place in chunk]
        worker.in_flight.extend(chunk)
        worker.has_taken = False
        worker.progress_at = time.monotonic()
        worker.send([[c.reward, c.completion, [dict(m) for m in c.prompt], dict(c.fields)] for c in calls])


def _call(place: _Place) -> RewardCall:
    submission, index = place
    return submission.calls[index]


def default_workers() -> int:
    """One worker for each core that this process may use, at most eight."""
    return min(8, usable_cores())


class RewardThreads(ClosedAtEnd):
    """Rewards that are callables of this process, passed from Python: one call at a time, in order, each in a thread of
    its own.

    A thread cannot be ended from outside. A call that exceeds its time counts as `timeout` and is left behind; its
    thread ends when the function returns, or with the process. For a limit that really ends a call, name the reward by
    its path.

    Raises:
        ManifestError: a target is a dotted path, or cannot be called as a reward is.
    """

    def __init__(self, targets: Sequence[RewardTarget]) -> None:
        for target in targets:
            if isinstance(target.target, str):
                raise ManifestError(
                    f"reward {target.name!r} is a dotted path, but others of this run were given from Python",
                    where="spec.environment.rewards",
                    fix="give every reward from Python, or none",
                )
            try:
                check_callable(target.target, target.name, target.arguments)
            except TargetError as error:
                raise ManifestError(str(error), where=f"spec.environment.rewards[{target.name!r}]") from error
        self._targets = {target.name: target for target in targets}
        self._queue: queue.SimpleQueue[tuple[Sequence[RewardCall], Future[list[RewardResult]]] | None] = (
            queue.SimpleQueue()
        )
        self._is_closing = False
        self._failures: list[RewardFailure] = []
        # A daemon thread, because a call that hangs must not keep the process alive.
        threading.Thread(target=self._serve, name="reward-threads", daemon=True).start()

    @property
    def failures(self) -> Sequence[RewardFailure]:
        return tuple(self._failures)

    def submit(self, calls: Sequence[RewardCall]) -> Future[list[RewardResult]]:
        future: Future[list[RewardResult]] = Future()
        future.set_running_or_notify_cancel()
        self._queue.put((tuple(calls), future))
        return future

    def score(self, calls: Sequence[RewardCall]) -> list[RewardResult]:
        return self.submit(calls).result()

    def close(self) -> None:
        self._is_closing = True
        self._queue.put(None)

    def _serve(self) -> None:
        while (submitted := self._queue.get()) is not None:
            calls, future = submitted
            results = []
            for call in calls:
                if self._is_closing:
                    break
                results.append(self._run(call))
            if len(results) == len(calls):
                future.set_result(results)
            else:
                future.set_exception(CancelledError())

    def _run(self, call: RewardCall) -> RewardResult:
        target = self._targets[call.reward]
        assert callable(target.target)
        function = target.target
        answer: queue.SimpleQueue[RewardResult] = queue.SimpleQueue()

        # Copied, so that a call's changes are invisible to other calls, as in processes.
        prompt, fields = copy.deepcopy(call.prompt), copy.deepcopy(dict(call.fields))

        def work() -> None:
            answer.put(call_reward(function, target.arguments, call.completion, prompt, fields))

        thread = threading.Thread(target=work, name=f"reward-{target.name}", daemon=True)
        thread.start()
        try:
            result = answer.get(timeout=target.timeout_seconds)
        except queue.Empty:
            reason = f"no answer within {target.timeout_seconds:g} s"
            result = RewardResult("timeout", None, reason, target.timeout_seconds, thread_stack(thread))
        if result.outcome in ("timeout", "crash") and len(self._failures) < MAX_FAILURES_KEPT:
            self._failures.append(build_failure(call, result))
        return result
