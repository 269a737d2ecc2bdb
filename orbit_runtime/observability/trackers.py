"""Sends every step's numbers to TensorBoard, Weights & Biases and MLflow too, if the manifest requests it.

The run folder is the source of truth, and a tracker a copy of it: each start also sends the rows of earlier steps, so
that a kill loses none, and each kind prevents duplicates. A tracker has its own thread. One that raises or hangs is
abandoned with a note, and the run continues.

Webhooks are told how a run ended. No failure of a tracker or a webhook changes how it ends.

Belongs here: the kinds, and the thread between them and a run. Does not belong here: what a row holds (`metrics`).
"""

from __future__ import annotations

import importlib.util
import math
import netrc
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from orbit_runtime.errors import (
    EXIT_DONE,
    EXIT_STOPPED,
    CredentialsError,
    DivergedError,
    GateError,
    UnsupportedError,
    UsageError,
)
from orbit_runtime.observability.metrics import MetricsRow

if TYPE_CHECKING:
    from orbit_runtime.spec import run as given
    from orbit_runtime.spec.run import TrackerType

QUEUE_ROWS = 1024
"""Most steps that may wait; a tracker that falls further behind is abandoned."""
CLOSE_SECONDS = 30.0
DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
PACKAGES: Mapping[TrackerType, str] = {"TensorBoard": "tensorboard", "WandB": "wandb", "MLflow": "mlflow"}


@dataclass(frozen=True)
class RequestedTracker:
    """One tracker of the manifest, and the run that is sent to it."""

    kind: TrackerType
    project: str
    uri: str | None
    run: str
    """The run's name."""
    run_id: str
    """Unique to a run folder and the same at each of its starts: letters, digits and `-`."""
    config: Mapping[str, Any]
    """The manifest."""


class Tracker(Protocol):
    """One kind of tracker. A single thread makes all calls, one at a time."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Sends the numbers of a step, each once. Steps come in order, including those before this start, which may be
        there already. Evaluation results of a step may follow in a second call."""

    def close(self) -> None:
        """Waits until everything was delivered."""


def check_trackers(asked: Sequence[RequestedTracker], environ: Mapping[str, str]) -> None:
    """Checks the trackers before anything is loaded.

    Raises:
        UnsupportedError: (78) a tracker cannot work.
        CredentialsError: (77) Weights & Biases has no key here; its client would prompt for one at the terminal.
    """
    for index, each in enumerate(asked):
        where = f"spec.observability.trackers[{index}]"
        package = PACKAGES[each.kind]
        if importlib.util.find_spec(package) is None:
            fix = "pip install 'orbit-rl[trackers]', or remove this tracker"
            raise UnsupportedError(f"{each.kind} needs the package {package}", where=f"{where}.type", fix=fix)
        if each.kind == "TensorBoard" and (each.uri is None or "://" in each.uri):
            raise UnsupportedError(
                "TensorBoard's files are written to a local folder, but the run folder is not local",
                where=f"{where}.uri",
                fix="write a local path",
            )
        # MLflow's own default is a database too.
        place = each.uri or environ.get("MLFLOW_TRACKING_URI", "sqlite:")
        opens_databases = each.kind != "MLflow" or importlib.util.find_spec("sqlalchemy") is not None
        if urlsplit(place).scheme in DATABASES and not opens_databases:
            raise UnsupportedError(
                f"MLflow's package here opens no database ({place})",
                where=f"{where}.uri",
                fix="write a server's address, or without a server a folder, such as `uri: mlruns`",
            )
        if each.kind == "WandB" and not _has_key(each.uri, environ):
            raise CredentialsError(
                "there is no key for Weights & Biases",
                where=where,
                fix="set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline",
            )


def _has_key(uri: str | None, environ: Mapping[str, str]) -> bool:
    """Whether there is a key, or none is needed."""
    if environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(uri or environ.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"
    try:
        # Where `wandb login` writes it.
        return netrc.netrc(environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class Tracking:
    """Feeds one tracker from its own thread."""

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        note: Callable[[str], None],
        earlier: Callable[[], Iterable[MetricsRow]] = tuple,
    ) -> None:
        """
        Args:
            open_tracker: called in the thread.
            note: called at most once, with a message for the user if something went wrong.
            earlier: gives the rows of the steps before this start; called and read in the thread.
        """
        self._name = name
        self._open = open_tracker
        self._note = note
        self._earlier = earlier
        self._sent: dict[str, int] = {}
        """Number → the last step sent. Used only by the thread."""
        self._once = threading.Lock()
        self._rows: queue.Queue[MetricsRow | None] = queue.Queue(QUEUE_ROWS)
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def row(self, row: MetricsRow) -> None:
        """Returns at once."""
        if self._given_up.is_set():
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._give_up(f"it is {QUEUE_ROWS} steps behind")

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Waits until everything is sent, but at most this long."""
        until = time.monotonic() + seconds
        while not self._given_up.is_set():
            try:
                self._rows.put(None, timeout=0.1)
                break
            except queue.Full:
                if time.monotonic() >= until:
                    break
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._give_up(f"it has not accepted everything within {seconds:.0f} s")

    def _work(self) -> None:
        try:
            tracker = self._open()
            for row in self._earlier():
                self._tell(tracker, row)
            while (item := self._rows.get()) is not None:
                if self._given_up.is_set():
                    return
                self._tell(tracker, item)
            tracker.close()
        # A service's client may raise anything, even SystemExit; none of it is a reason to lose a run.
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def _tell(self, tracker: Tracker, row: MetricsRow) -> None:
        step = int(row.number("step") or 0)
        fresh = {name: value for name, value in numbers(row).items() if self._sent.get(name, -1) < step}
        self._sent |= dict.fromkeys(fresh, step)
        if fresh:
            tracker.log(step, fresh)

    def _give_up(self, reason: str) -> None:
        if self._once.acquire(blocking=False):
            self._given_up.set()
            self._note(
                f"warning: {self._name} gets no more rows, but the run continues: {reason}; its rows are in the run "
                "folder, and the next start of this run sends them again"
            )


def numbers(row: MetricsRow) -> dict[str, float]:
    """The finite numbers of a row, without the step."""
    found = ((name, row.number(name)) for name in row if name != "step")
    return {name: value for name, value in found if value is not None and math.isfinite(value)}


def open_tracker(asked: RequestedTracker) -> Tracker:
    kinds: dict[str, Callable[[RequestedTracker], Tracker]] = {
        "TensorBoard": TensorBoard,
        "WandB": WandB,
        "MLflow": MLflow,
    }
    return kinds[asked.kind](asked)


class TensorBoard:
    """TensorBoard event files. Each start sends everything again after a mark that invalidates earlier files."""

    def __init__(self, asked: RequestedTracker) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

        assert asked.uri is not None, "checked before the run"
        folder = Path(asked.uri)
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        # On this mark, readers drop what they have of this step and later ones.
        mark = Event(step=0, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
        self._writer.add_event(mark)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        summary = self._summary(
            value=[self._summary.Value(tag=tag(name), simple_value=value) for name, value in values.items()]
        )
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=summary))

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run with the id of the run folder, so that a later start continues it; the service accepts a step once."""

    def __init__(self, asked: RequestedTracker) -> None:
        import wandb

        settings = wandb.Settings(silent=True, console="off", base_url=asked.uri or wandb.Settings().base_url)
        self._run = wandb.init(
            project=asked.project,
            name=asked.run,
            id=asked.run_id,
            resume="allow",
            config=dict(asked.config),
            settings=settings,
        )
        self._first = int(self._run.step or 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._first:
            self._run.log({tag(name): value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run identified by its tag; steps that the server has are not sent again."""

    def __init__(self, asked: RequestedTracker) -> None:
        from mlflow.entities import Metric, Param, RunStatus
        from mlflow.tracking import MlflowClient

        if urlsplit(asked.uri or "").scheme in ("", "file"):
            # MLflow opens a folder only for those who insist on it.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._metric, self._done = Metric, RunStatus.to_string(RunStatus.FINISHED)
        self._client = MlflowClient(tracking_uri=asked.uri)
        experiment = self._client.get_experiment_by_name(asked.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(asked.project)
        found = self._client.search_runs([number], filter_string=f"tags.`orbit.run_id` = '{asked.run_id}'")
        self._last: dict[str, int] = {}
        """Metric → the last step that the server has."""
        self._is_new = not found
        if found:
            self._run = found[0].info.run_id
        else:
            tags = {"orbit.run_id": asked.run_id}
            self._run = self._client.create_run(number, run_name=asked.run, tags=tags).info.run_id
            flat = [Param(name, value[:500]) for name, value in _flat(asked.config)]
            for start in range(0, len(flat), 100):
                self._client.log_batch(self._run, params=flat[start : start + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        told = {tag(name): value for name, value in values.items()}
        metrics = [self._metric(key, value, now, step) for key, value in told.items() if step > self._last_of(key)]
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)

    def _last_of(self, key: str) -> int:
        if self._is_new:
            return -1
        if key not in self._last:
            history = self._client.get_metric_history(self._run, key)
            self._last[key] = max((each.step for each in history), default=-1)
        return self._last[key]

    def close(self) -> None:
        self._client.set_terminated(self._run, self._done)


_GROUPS = ("reward", "parity", "seconds", "eval")


def tag(name: str) -> str:
    """Example: `reward_mean` is `reward/mean`, which all three show in a group; `loss` is `train/loss`."""
    group, _, rest = name.partition("_")
    return f"{group}/{rest}" if rest and group in _GROUPS else f"train/{name}"


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [pair for key, each in value.items() for pair in _flat(each, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list):
        return [pair for index, each in enumerate(value) for pair in _flat(each, f"{path}.{index}")]
    return [(path, str(value))]


ATTEMPTS, TIMEOUT_SECONDS, PAUSE_SECONDS = 3, 5.0, 1.0
GATES = (GateError.exit_code, DivergedError.exit_code)


@dataclass(frozen=True)
class Webhook:
    """An address, and the events to send to it."""

    url: str
    events: Sequence[str]
    name: str
    """Name in messages: the manifest's field, never the address, which may be a secret."""


def build_webhooks(asked: Sequence[given.Webhook], environ: Mapping[str, str]) -> list[Webhook]:
    """Webhooks from `spec.observability.notify`. Raises UsageError if a variable is not set or is not an address."""
    found = []
    for index, each in enumerate(asked):
        where = f"spec.observability.notify[{index}]"
        url = each.url
        if each.url_env is not None:
            url, where = environ.get(each.url_env, ""), f"{where}.urlEnv"
            if not url.startswith(("http://", "https://")):
                problem = "holds no address that begins with https://" if url else "is not set"
                fix = "set it, on a cluster by a secret of spec.placement.envFromSecrets"
                raise UsageError(f"the variable {each.url_env} {problem}", where=where, fix=fix)
        assert url is not None, "the spec asks for one of the two"
        found.append(Webhook(url, each.events, where))
    return found


def event_of(exit_code: int) -> given.Event:
    if exit_code == EXIT_DONE:
        return "Done"
    if exit_code == EXIT_STOPPED:
        return "Stopped"
    return "Gate" if exit_code in GATES else "Failed"


def build_body(status: Mapping[str, Any], *, exit_code: int, uri: str) -> dict[str, Any]:
    """The body; Slack, Mattermost and Google Chat show its `text`."""
    run, event = status["run"], event_of(exit_code)
    step, total, message = status.get("step"), status.get("total"), status.get("message")
    text = f"Orbit run {run}: {event.lower()} after step {step} of {total}"
    return {
        "text": f"{text}: {message}" if message else text,
        "event": event,
        "run": run,
        "namespace": status.get("namespace"),
        "exit_code": exit_code,
        "message": message,
        "step": step,
        "total": total,
        "reward_mean": status.get("reward"),
        "uri": uri,
        "report": f"{uri.rstrip('/')}/report.html",
    }


def notify(
    webhooks: Sequence[Webhook],
    body: Mapping[str, Any],
    note: Callable[[str], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Notifies the webhooks for this event; one that does not answer is noted, after about 20 s at most."""
    for each in webhooks:
        if body["event"] not in each.events:
            continue
        problem = ""
        for attempt in range(ATTEMPTS):
            problem, again = _post(each.url, body)
            if not again:
                break
            if attempt + 1 < ATTEMPTS:
                sleep(PAUSE_SECONDS * 2**attempt)
        if problem:
            note(f"warning: {each.name} could not be notified of the run's end: {problem}")


def _post(url: str, body: Mapping[str, Any]) -> tuple[str, bool]:
    """An error, empty if there is none, and whether to retry. Contains no part of the address."""
    import httpx

    try:
        answer = httpx.post(url, json=body, headers={"User-Agent": "orbit-rl"}, timeout=TIMEOUT_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return type(error).__name__, isinstance(error, httpx.TransportError)
    if answer.is_success:
        return "", False
    return f"HTTP {answer.status_code}", answer.status_code == 429 or answer.status_code >= 500
