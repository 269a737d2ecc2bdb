"""Answers side by side: as they come, as they end, and as a model must not write them."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console
from rich.text import Text

from orbit_runtime.cli.chat import stream_chat
from orbit_runtime.cli.side_by_side import is_wide, show_side_by_side
from orbit_runtime.errors import EngineDiedError
from orbit_runtime.observability.logs import printable

ENDLESS = 10_000


def screen(**settings: Any) -> Console:
    return Console(**{"file": io.StringIO(), "force_terminal": True, "width": 100, "height": 20, **settings})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def says(*words: str, reason: str = "stop") -> Any:
    for word in words:
        yield word, None
    yield "", reason


def test_both_answers_stand_in_one_line_each_under_its_name() -> None:
    console = screen()
    found = show_side_by_side(console, {"base": says("4", "7"), "step-20": says("46", reason="length")}, "seed 3")
    assert [(name, each.text, each.reason) for name, each in found.items()] == [
        ("base", "47", "stop"), ("step-20", "46", "length")
    ]  # fmt: skip
    # What stood there while they came is taken off again; this is the last drawing.
    *_, names, _, texts, _, note = Text.from_ansi(written(console)).plain.splitlines()
    assert names.index("step-20") == texts.index("46")
    assert texts.index("47") < 50 < texts.index("46")
    assert "46 [length]" in texts
    assert "seed 3" in note


def test_they_are_read_at_the_same_time() -> None:
    meet = threading.Barrier(2, timeout=20)

    def waits() -> Iterator[tuple[str, str | None]]:
        meet.wait()
        yield "met", "stop"

    found = show_side_by_side(screen(), {"a": waits(), "b": waits()}, "")  # type: ignore[dict-item]
    assert [each.text for each in found.values()] == ["met", "met"]


def test_a_long_answer_is_whole_at_its_end_and_on_the_screen_before_by_its_last_lines() -> None:
    shown = threading.Event()

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            if "row 299" in text:
                shown.set()
            return super().write(text)

    def rows() -> Iterator[tuple[str, str | None]]:
        yield "\n".join(f"row {number}" for number in range(300)), None
        assert shown.wait(20), "its newest line was never on the screen"
        yield "", "stop"

    console = screen(file=Watched())
    show_side_by_side(console, {"a": rows(), "b": says("short")}, "")  # type: ignore[dict-item]
    assert all(written(console).count(f"row {number} ") == 1 for number in range(100, 200)), "once, at its end"


def test_what_one_raises_ends_both() -> None:
    closed = threading.Event()

    def endless() -> Iterator[tuple[str, str | None]]:
        try:
            while True:
                yield "x", None
        finally:
            closed.set()

    def fails() -> Iterator[tuple[str, str | None]]:
        yield "x", None
        raise EngineDiedError("gone", where="there")

    with pytest.raises(EngineDiedError, match="gone"):
        show_side_by_side(screen(), {"a": endless(), "b": fails()}, "")  # type: ignore[dict-item]
    assert closed.wait(20), "the request of the other is ended"


@pytest.fixture
def interrupts() -> Iterator[None]:
    """As at a terminal: a shell starts what goes on in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_both_answers_and_nothing_else() -> None:
    closed = threading.Semaphore(0)

    def endless(interrupts: bool) -> Iterator[tuple[str, str | None]]:
        try:
            for number in range(ENDLESS):
                if number == 3 and interrupts:
                    os.kill(os.getpid(), signal.SIGINT)
                yield "x ", None
                threading.Event().wait(0.01)
        finally:
            closed.release()

    console = screen()
    found = show_side_by_side(console, {"a": endless(True), "b": endless(False)}, "")  # type: ignore[dict-item]
    assert all(closed.acquire(timeout=20) for _ in range(2))
    assert [each.reason for each in found.values()] == ["interrupted", "interrupted"]
    assert all(0 < len(each.text) < 2 * ENDLESS for each in found.values())
    assert written(console).count("[interrupted]") == 2


def test_a_model_commands_no_terminal() -> None:
    assert printable("a\x1b[2Jb\n\tc\x07\x9b1m\x7f") == "a␛[2Jb\n\tc␇\ufffd1m␡"
    console = screen()
    show_side_by_side(console, {"a": says("\x1b]0;title\x07"), "b": says("[bold]x[/bold]")}, "")
    assert "\x1b]0;" not in written(console)
    assert "[bold]x[/bold]" in written(console), "and no markup of ours is read in it"


def test_a_model_ends_no_line_of_the_stream() -> None:
    said = {"delta": {"content": "a\u2028b\x85"}, "finish_reason": None}
    sent = f"data: {json.dumps({'choices': [said]}, ensure_ascii=False)}\r\n\r\ndata: [DONE]\r\n\r\n"
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=sent))
    with httpx.Client(transport=transport, base_url="http://there/v1") as client:
        assert [*stream_chat(client, "policy", [], {})] == [("a\u2028b\x85", None)]


@pytest.mark.parametrize(("settings", "wide"), [({}, True), ({"width": 79}, False), ({"force_terminal": False}, False)])
def test_columns_need_a_terminal_that_is_wide_enough(settings: dict[str, Any], wide: bool) -> None:
    assert is_wide(screen(**settings)) == wide
