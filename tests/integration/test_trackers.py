"""Trackers and webhooks: what the real libraries' files hold of a real run, and what they cannot do to it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from orbit_runtime.errors import CredentialsError, OrbitError, UnsupportedError, UsageError
from orbit_runtime.loop import run
from orbit_runtime.observability.metrics import build_row, evaluation_field
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.observability.trackers import (
    QUEUE_ROWS,
    RequestedTracker,
    Tracking,
    build_body,
    build_webhooks,
    check_trackers,
    notify,
    open_tracker,
)
from orbit_runtime.spec import load_manifest
from orbit_runtime.spec.run import Webhook as Given

QUICKSTART = Path(__file__).parents[2] / "examples/quickstart.yaml"
SMALL = [
    "training.promptsPerStep=2", "algorithm.groupSize=4", "rollout.sampling.maxNewTokens=3",
    "observability.metricsPort=-1",
]  # fmt: skip


class Receiver:
    """An HTTP server that keeps what it is sent, and answers as it is told."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.answers: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(receiver.answers.pop(0) if receiver.answers else 200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook/secret-token"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def train(out: Path, steps: int, *settings: str) -> None:
    manifest = load_manifest(QUICKSTART, [f"spec.{each}" for each in (*SMALL, f"training.steps={steps}", *settings)])
    run(manifest, out=str(out), progress=SilentProgress())


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.filterwarnings("ignore")
def test_every_step_is_in_each_tracker_once_after_a_second_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("HOOK", receiver.url)
    out, mlflow = tmp_path / "run", f"file://{tmp_path}/mlflow"
    trackers = f"[{{type: TensorBoard}}, {{type: WandB}}, {{type: MLflow, uri: '{mlflow}', project: sums}}]"
    settings = [f"observability.trackers={trackers}", "observability.notify=[{urlEnv: HOOK}]"]
    train(out, 2, *settings)
    train(out, 3, *settings)
    rewards = [row["reward_mean"] for row in rows_of(out)]
    assert len(rewards) == 3

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("reward/mean")
    assert [(each.step, pytest.approx(each.value)) for each in scalars] == list(enumerate(rewards, 1))
    assert "train/grad_norm" in events.Tags()["scalars"]

    client = MlflowClient(tracking_uri=mlflow)
    experiment = client.get_experiment_by_name("sums")
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert [(each.step, each.value) for each in history] == list(enumerate(rewards, 1))
    assert found.data.params["spec.algorithm.groupSize"] == "4"
    assert found.info.status == "FINISHED"

    # Offline, each start writes a file of the same run; the service takes each step of it once. Step 0 is the
    # evaluation before the first step.
    ids, steps = wandb_files(tmp_path)
    assert len(ids) == 2
    assert len(set(ids)) == 1
    assert steps == [[0, 1, 2], [0, 1, 2, 3]]

    assert [each["event"] for each in receiver.got] == ["Done", "Done"]
    assert receiver.got[1]["step"] == 3
    assert receiver.got[1]["report"] == f"{out}/report.html"


def wandb_files(folder: Path) -> tuple[list[str], list[list[int]]]:
    """The run's id and its steps in each offline file, in the order of writing."""
    ids, steps = [], []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda each: each.stat().st_mtime):
        ids.append(path.stem.removeprefix("run-"))
        found = []
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                found.append(record.history.step.num)
        steps.append(found)
    return ids, steps


def log_records(content: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's format: blocks of 32 KiB; before a part of a record stand
    checksum, size and kind.
    """
    at, parts = 7, b""  # Behind the file's own header.
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # Whole, or the last part.
            yield parts
            parts = b""


def test_the_guides_block_is_a_manifests() -> None:
    guide = (QUICKSTART.parents[1] / "docs/guides/trackers.md").read_text(encoding="utf-8")
    block = yaml.safe_load(guide.split("```yaml", 1)[1].split("```", 1)[0])
    given = load_manifest(QUICKSTART, [f"spec.observability={json.dumps(block['observability'])}"])
    assert [each.type for each in given.spec.observability.trackers] == ["TensorBoard", "WandB", "MLflow"]
    assert given.spec.observability.notify[0].url_env == "SLACK_WEBHOOK"


class Recorder:
    """A tracker that keeps the steps."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.steps.append(-1)


def test_a_tracker_is_told_all_rows_in_order_and_then_closed() -> None:
    steps: list[int] = []
    tracking = Tracking("T", lambda: Recorder(steps), pytest.fail)
    for step in range(1, 100):
        tracking.row(build_row(step=step, loss=1.0))
    tracking.close()
    assert steps == [*range(1, 100), -1]


@pytest.mark.parametrize("error", [RuntimeError("quota"), SystemExit(1), KeyboardInterrupt()])
def test_a_tracker_that_raises_is_given_up_with_one_word(error: BaseException) -> None:
    class Raises(Recorder):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise error

    said: list[str] = []
    tracking = Tracking("MLflow", lambda: Raises([]), said.append)
    for step in range(5):
        tracking.row(build_row(step=step, loss=1.0))
    tracking.close()
    assert len(said) == 1
    assert "MLflow gets no more rows, but the run continues" in said[0]


def test_a_tracker_that_hangs_holds_a_run_no_longer_than_it_is_given() -> None:
    free = threading.Event()

    class Hangs(Recorder):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            free.wait()

    said: list[str] = []
    tracking = Tracking("WandB", lambda: Hangs([]), said.append)
    started = time.monotonic()
    for step in range(QUEUE_ROWS + 10):
        tracking.row(build_row(step=step, loss=1.0))
    tracking.close(0.3)
    assert time.monotonic() - started < 20
    assert len(said) == 1
    free.set()


def asked(kind: str, uri: str | None = None) -> RequestedTracker:
    return RequestedTracker(kind, "orbit", uri, "a", "a-1", {})


def test_a_tracker_that_cannot_work_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"trackers\[0\]\.uri"):
        check_trackers([asked("TensorBoard")], {})
    monkeypatch.setitem(sys.modules, "wandb", None)  # As where it is not installed.
    with pytest.raises(UnsupportedError, match=r"trackers\[1\]\.type: WandB needs the package wandb") as refused:
        check_trackers([asked("TensorBoard", "events"), asked("WandB")], {})
    assert "orbit-rl[trackers]" in str(refused.value.fix)


@pytest.mark.parametrize(
    ("uri", "environ"), [("sqlite:///m.db", {}), (None, {}), (None, {"MLFLOW_TRACKING_URI": "sqlite:///m"})]
)
def test_a_database_that_mlflows_package_cannot_open_is_refused_before_the_run(
    uri: str | None, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)  # As where it is not installed.
    with pytest.raises(
        UnsupportedError, match=r"trackers\[0\]\.uri: MLflow's package here opens no database"
    ) as refused:
        check_trackers([asked("MLflow", uri)], environ)
    assert "uri: mlruns" in str(refused.value.fix)
    check_trackers([asked("MLflow", "mlruns"), asked("MLflow", "http://mlflow:5000")], {})


def test_mlflow_without_a_server_takes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    tracker = open_tracker(asked("MLflow", "mlruns"))
    tracker.log(1, {"reward_mean": 0.5})
    tracker.close()
    assert MlflowClient(tracking_uri="mlruns").get_experiment_by_name("orbit") is not None


def test_without_a_key_weights_and_biases_is_refused_and_never_asks_for_one(tmp_path: Path) -> None:
    wandb = [asked("WandB", "https://wandb.example")]
    nowhere = {"NETRC": str(tmp_path / "netrc")}
    with pytest.raises(CredentialsError, match=r"trackers\[0\]: there is no key") as refused:
        check_trackers(wandb, nowhere)
    assert "WANDB_MODE=offline" in str(refused.value.fix)
    for enough in ({"WANDB_API_KEY": "k"}, {"WANDB_MODE": "offline"}):
        check_trackers(wandb, nowhere | enough)
    (tmp_path / "netrc").write_text("machine wandb.example login user password key\n")
    check_trackers(wandb, nowhere)
    with pytest.raises(CredentialsError):
        check_trackers([asked("WandB", "https://other.example")], nowhere)


def test_rows_of_a_long_run_before_this_start_are_no_backlog(tmp_path: Path) -> None:
    steps: list[int] = []
    opened = threading.Event()

    def slowly() -> Recorder:
        opened.wait(10)
        return Recorder(steps)

    earlier = [build_row(step=step, loss=1.0) for step in range(1, 3 * QUEUE_ROWS)]
    tracking = Tracking("T", slowly, pytest.fail, lambda: iter(earlier))
    tracking.row(build_row(step=3 * QUEUE_ROWS, loss=1.0))
    opened.set()
    tracking.close()
    assert steps == [*range(1, 3 * QUEUE_ROWS + 1), -1]


def test_what_is_evaluated_behind_a_step_follows_its_row_once() -> None:
    told: list[tuple[int, dict[str, float]]] = []

    class Keeps(Recorder):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            told.append((step, dict(values)))

    tracking = Tracking("T", lambda: Keeps([]), pytest.fail)
    evaluated = {evaluation_field("sums", "mean"): 0.5}
    tracking.row(build_row(step=0, **evaluated))
    tracking.row(build_row(step=1, loss=2.0))
    tracking.row(build_row(step=1, **evaluated))
    tracking.row(build_row(step=1, loss=2.0, **evaluated))
    tracking.close()
    assert told == [(0, {"eval_sums_mean": 0.5}), (1, {"loss": 2.0}), (1, {"eval_sums_mean": 0.5})]


@pytest.mark.filterwarnings("ignore")
def test_evaluations_of_a_run_are_in_trackers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    out, mlflow = tmp_path / "run", f"file://{tmp_path}/mlflow"
    held_out = "[{name: sums, prompts: [{uri: builtin://two-digit-addition}]}]"
    settings = [
        f"observability.trackers=[{{type: TensorBoard}}, {{type: MLflow, uri: '{mlflow}'}}]",
        f"evaluation={{everySteps: 1, limit: 4, samples: 1, environments: {held_out}}}",
    ]
    train(out, 1, *settings)
    train(out, 2, *settings)
    means = {row["step"]: row["eval_sums_mean"] for row in rows_of(out)}
    assert list(means) == [1, 2]

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    scalars = {each.step: pytest.approx(each.value) for each in events.Scalars("eval/sums_mean")}
    assert [each.step for each in events.Scalars("eval/sums_mean")] == [0, 1, 2]
    assert {step: scalars[step] for step in means} == means

    client = MlflowClient(tracking_uri=mlflow)
    (found,) = client.search_runs([client.get_experiment_by_name("orbit").experiment_id])
    history = client.get_metric_history(found.info.run_id, "eval/sums_mean")
    assert [each.step for each in history] == [0, 1, 2]
    assert {each.step: each.value for each in history if each.step} == means


def test_a_failed_run_is_told_with_its_exit_code_and_an_unset_variable_stops_it_first(
    tmp_path: Path, receiver: Receiver
) -> None:
    settings = ["model.uri=builtin://tiny-none", f"observability.notify=[{{url: '{receiver.url}'}}]"]
    with pytest.raises(OrbitError) as failed:
        train(tmp_path / "run", 1, *settings)
    (told,) = receiver.got
    assert (told["event"], told["exit_code"], told["run"]) == ("Failed", failed.value.exit_code, "quickstart")
    assert failed.value.message in told["message"]
    with pytest.raises(UsageError, match="UNSET_HOOK is not set"):
        train(tmp_path / "other", 1, "observability.notify=[{urlEnv: UNSET_HOOK}]")
    assert not (tmp_path / "other").exists() or not any((tmp_path / "other").iterdir())


@pytest.mark.parametrize(
    ("exit_code", "event"), [(0, "Done"), (75, "Stopped"), (84, "Gate"), (85, "Gate"), (70, "Failed"), (79, "Failed")]
)
def test_who_asked_for_an_event_is_told_and_nobody_else(exit_code: int, event: str, receiver: Receiver) -> None:
    every = ("Done", "Stopped", "Failed", "Gate")
    mine = build_webhooks([Given(url=receiver.url, events=(event,))], {})
    others = build_webhooks([Given(url=receiver.url, events=tuple(each for each in every if each != event))], {})
    body = build_body({"run": "a", "step": 3, "total": 9, "message": "why"}, exit_code=exit_code, uri="s3://b/a")
    notify([*mine, *others], body, pytest.fail)
    (told,) = receiver.got
    assert (told["event"], told["report"]) == (event, "s3://b/a/report.html")


def test_an_address_is_tried_again_and_never_written_down(receiver: Receiver) -> None:
    said: list[str] = []
    slept: list[float] = []
    body = build_body({"run": "a"}, exit_code=0, uri="runs/a")
    hooks = build_webhooks([Given(url=receiver.url)], {})
    receiver.answers = [500, 429, 200]
    notify(hooks, body, said.append, sleep=slept.append)
    assert (len(receiver.got), slept, said) == (3, [1.0, 2.0], [])
    receiver.answers = [403]
    notify(hooks, body, said.append, sleep=slept.append)
    assert len(receiver.got) == 4
    assert "HTTP 403" in said.pop()
    with suppress(OSError):
        receiver.close()
    notify(hooks, body, said.append, sleep=slept.append)
    assert len(said) == 1
    assert "secret-token" not in said[0]
