"""What is printed while a run runs, for each kind of audience."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime

import pytest
from fakes.run_folder import synthetic_row
from rich.console import Console

from orbit_runtime.observability.logs import LogFormat
from orbit_runtime.observability.metrics import MetricsRow
from orbit_runtime.observability.progress import (
    JsonProgress,
    LiveProgress,
    PlainProgress,
    Progress,
    build_progress,
    format_seconds,
    sparkline,
)


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def play(progress: Progress, steps: int = 3) -> None:
    progress.start(total=5, resumed_at=0)
    progress.stage("collect")
    for step in range(1, steps + 1):
        progress.step(synthetic_row(step, total=5))
    progress.note("the newest checkpoint was damaged", step=3, run="newest")
    progress.finish({"status": "done", "reward_last": 0.7})
    progress.close()


def test_json_lines_are_one_event_each_and_a_step_carries_the_whole_row() -> None:
    stream = io.StringIO()
    play(JsonProgress(stream))
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["start", "step", "step", "step", "note", "finish"]
    assert events[1]["reward_mean"] == synthetic_row(1, total=5)["reward_mean"]
    assert events[4] == {"event": "note", "message": "the newest checkpoint was damaged", "step": 3, "run": "newest"}


def test_a_reader_that_leaves_does_not_stop_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    play(JsonProgress(Gone()))
    play(PlainProgress(Gone()))


@pytest.mark.parametrize(
    ("log_format", "environ", "kind"),
    [
        ("Auto", {}, PlainProgress),
        ("Auto", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, JsonProgress),
        ("JSON", {}, JsonProgress),
        ("Text", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, PlainProgress),
    ],
)
def test_a_file_gets_text_and_a_pods_log_json_lines(
    log_format: LogFormat, environ: dict[str, str], kind: type[Progress]
) -> None:
    assert isinstance(build_progress(log_format=log_format, environ=environ, stream=io.StringIO()), kind)


def test_a_terminal_may_be_given_text_or_json_lines() -> None:
    environ = {"TERM": "xterm"}
    assert isinstance(build_progress(log_format="Text", environ=environ, stream=Terminal()), PlainProgress)
    assert isinstance(build_progress(log_format="JSON", environ=environ, stream=Terminal()), JsonProgress)


def test_lines_of_text_begin_with_their_time_and_tell_the_stages_of_the_start() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, lambda: datetime(2026, 11, 24, 22, 5, 1, tzinfo=UTC))
    progress.stage("loading the model, 1.2 GiB")
    play(progress, steps=1)
    first, step, note = stream.getvalue().splitlines()
    progress.note("target  layers\nq_proj       4")
    assert stream.getvalue().splitlines()[3:] == [
        "2026-11-24T22:05:01Z target  layers", "2026-11-24T22:05:01Z q_proj       4"
    ]  # fmt: skip
    assert first == "2026-11-24T22:05:01Z start: loading the model, 1.2 GiB"
    assert step.startswith("2026-11-24T22:05:01Z step 1/5  reward ")
    assert note.endswith("the newest checkpoint was damaged (step 3)"), "a step's stages are not printed"


def test_json_lines_tell_the_stages_of_the_start() -> None:
    stream = io.StringIO()
    progress = JsonProgress(stream)
    progress.stage("importing torch")
    play(progress, steps=0)
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert events[0] == {"event": "stage", "stage": "importing torch"}
    assert [event["event"] for event in events[1:]] == ["start", "note", "finish"]


def test_an_evaluation_is_told_when_it_begins_because_it_may_take_longer_than_many_steps() -> None:
    lines, events = io.StringIO(), io.StringIO()
    for progress in (PlainProgress(lines), JsonProgress(events)):
        progress.start(total=5)
        progress.stage("collect")
        progress.stage("evaluate")
    assert lines.getvalue().splitlines() == ["evaluating the policy"]
    assert json.loads(events.getvalue().splitlines()[1]) == {"event": "stage", "stage": "evaluate"}


def test_a_terminal_shows_what_the_start_does_and_for_how_long() -> None:
    stream = Terminal()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None, legacy_windows=False)
    now = iter(range(1000))
    progress = LiveProgress(console, "adder", lambda: next(now))
    progress.stage("importing torch")
    progress.close()
    assert "adder importing torch, " in stream.getvalue()
    assert "step" not in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    progress = build_progress(stream=stream)
    assert isinstance(progress, PlainProgress)
    play(progress)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("step 1/5  reward ")
    assert lines[-1] == "the newest checkpoint was damaged (step 3)"
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    progress = build_progress("quickstart", stream=stream)
    assert isinstance(progress, LiveProgress)
    play(progress)
    assert "quickstart step 3/5" in stream.getvalue()


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    play(build_progress("quickstart", stream=stream))
    assert "\x1b[32m" not in stream.getvalue()
    assert "\x1b[1;32m" not in stream.getvalue()


@pytest.mark.parametrize("width", [30, 40, 80, 200])
def test_the_live_lines_fit_the_width(width: int) -> None:
    stream = Terminal()
    console = Console(file=stream, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    progress = LiveProgress(console, "a-run-with-quite-a-long-name")
    progress.start(total=100, resumed_at=0)
    for step in range(1, 60):
        progress.step(synthetic_row(step, total=100))
    lines = progress.lines()
    progress.close()
    assert all(line.cell_len <= width for line in lines)
    assert "59/100" in lines[0].plain


@pytest.mark.parametrize(
    ("rewards", "trend"),
    [
        # Lower than at the start, though the last two are above the two before.
        ([0.5, 0.1, 0.2, 0.3, 0.2], "↓ -0.050"),
        ([0.1, 0.2, 0.9, 0.5], "↑ +0.550"),
        ([0.3, 0.3, 0.3], "→ +0.000"),
        ([0.3], ""),
    ],
)
def test_the_arrow_and_the_number_of_the_trend_say_the_same(rewards: list[float], trend: str) -> None:
    console = Console(file=Terminal(), force_terminal=True, width=120, color_system=None, legacy_windows=False)
    progress = LiveProgress(console)
    progress.start(total=9, resumed_at=0)
    for step, reward in enumerate(rewards, 1):
        progress.step(MetricsRow({**synthetic_row(step, total=9), "reward_mean": reward}))
    told = progress.lines()[1].plain
    progress.close()
    assert f"reward {rewards[-1]:.4f} {trend}   " in told


def test_closing_without_starting_is_harmless() -> None:
    for progress in (LiveProgress(Console(file=io.StringIO())), JsonProgress(io.StringIO()), PlainProgress(Terminal())):
        progress.close()
        progress.close()


@pytest.mark.parametrize(("seconds", "words"), [(None, "-"), (42, "42 s"), (185, "3:05 min"), (7800, "2:10 h")])
def test_times_are_readable(seconds: float | None, words: str) -> None:
    assert format_seconds(seconds) == words


def test_a_sparkline_spans_its_lowest_and_highest_value() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([0.3, 0.3], 10) == "▁▁"
    assert sparkline([], 10) == ""
    assert sparkline([0.0, 0.2, 0.8, 1.0], 2) == "▁█"


@pytest.mark.parametrize("done", [60, 63])
def test_a_run_with_nothing_left_is_not_resumed_after_a_step_it_does_not_have(done: int) -> None:
    stream = Terminal()
    PlainProgress(stream).start(total=60, resumed_at=done)
    assert stream.getvalue() == ""
    live = LiveProgress(Console(file=stream, force_terminal=True, width=80))
    live.start(total=60, resumed_at=done)
    live.close()
    assert f"step {done}/{done} " in live.lines()[0].plain
    assert "resumed" not in stream.getvalue()
