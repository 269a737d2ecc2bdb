"""What a command that takes a while says where no bar can be drawn."""

from __future__ import annotations

import pytest

from orbit_runtime.cli.bars import bytes_bar, evaluation_bar, steps_bar


def test_a_model_is_named_when_it_begins_and_ends_and_now_and_then() -> None:
    said: list[str] = []
    now = [0.0]
    with evaluation_bar(said.append, lambda: now[0]) as show:
        for model, done, at in (
            ("base", 20, 0), ("step-3", 5, 1), ("step-3", 6, 2), ("step-3", 9, 31), ("step-3", 10, 32),
            ("step-3", 20, 33), ("step-6", 0, 90), ("step-6", 1, 91),
        ):  # fmt: skip
            now[0] = at
            show(model, done, 20)
    assert said == [
        "base: all 20 samples were there",
        "step-3: asking for 15 samples, 5 were there",
        "step-3: 9 of 20 samples",
        "step-3: 20 of 20 samples",
        "step-6: asking for 20 samples",
    ]


def test_work_of_a_minute_is_told_twice_and_short_work_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with bytes_bar("converting", lambda: now[0]) as show:
        for second in range(0, 61, 10):
            now[0] = second
            show(second << 20, 60 << 20, "model.safetensors")
    assert capsys.readouterr().err.splitlines() == [
        "converting: 30.0 MiB of 60.0 MiB, model.safetensors",
        "converting: 60.0 MiB of 60.0 MiB, model.safetensors",
    ]
    with steps_bar("replaying", lambda: now[0]) as show_step:
        show_step(1, 3)
        now[0] += 30
        show_step(2, 3)
        show_step(3, 3)
    assert capsys.readouterr().err.splitlines() == ["replaying: 2 of 3"]
