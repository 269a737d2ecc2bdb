"""What `orbit plan` prints: whole lines in a narrow terminal, and where the device ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from orbit_runtime.api.checks import find_facts
from orbit_runtime.cli.plan import find_machine
from orbit_runtime.cli.plan_table import BAR_WIDTH, print_plan
from orbit_runtime.planner import Plan, plan
from orbit_runtime.spec import load_manifest

EXAMPLES = Path(__file__).parents[3] / "examples"


def made(name: str, gpu: str | None = None, overrides: Sequence[str] = ()) -> Plan:
    run = load_manifest(EXAMPLES / f"{name}.yaml", list(overrides))
    return plan(run, find_facts(run, EXAMPLES), find_machine(run, gpu))


def printed(
    name: str, capsys: pytest.CaptureFixture[str], gpu: str | None = None, overrides: Sequence[str] = ()
) -> list[str]:
    print_plan(made(name, gpu, overrides))
    return capsys.readouterr().out.splitlines()


def bars(lines: list[str]) -> dict[str, str]:
    return {line.split("|")[0].strip(): line for line in lines if line[8:9] == "|"}


@pytest.mark.parametrize("width", ["80", "120"])
@pytest.mark.parametrize("name", ["kimi-k2-6", "qwen3-4b"])
def test_table_and_bars_do_not_wrap(
    name: str, width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    lines = printed(name, capsys)
    start = next(index for index, line in enumerate(lines) if line.startswith("GiB a GPU"))
    table = lines[start : lines.index("", start)]
    assert max(map(len, table)) <= 80
    assert len(bars(table)) == 4


def test_a_bar_ends_where_the_device_does_and_what_is_over_stands_behind(capsys: pytest.CaptureFixture[str]) -> None:
    for line in bars(printed("kimi-k2-6", capsys)).values():
        assert line[9 + BAR_WIDTH] == "|"
        assert line.rpartition("|")[2].endswith("%")
    over = bars(printed("kimi-k2-6", capsys, "H100"))
    edges = {line.rpartition("|")[0].count("") for line in over.values()}
    assert len(edges) == 1, "the device ends at the same column in every phase"
    assert all(line.rpartition("|")[2].strip("R AXK").endswith("%") for line in over.values())
    assert "R" in over["train"].rpartition("|")[2]


def test_the_phase_that_decides_is_told_from_the_fullest(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed("kimi-k2-6", capsys)
    told = [line for line in lines if line.startswith("fullest phase")]
    assert told == ["fullest phase: publish, 723.9 MiB left"]
    assert any(line.startswith("each server: ") and "4 adapter slots" in line for line in lines)
    # A cache that sleeps is not there while the trainer works.
    asleep = printed("kimi-k2-6", capsys, overrides=["rollout.engine=SGLang", "rollout.sleep=Cache"])
    told = [line for line in asleep if line.startswith("fullest phase")]
    assert len(told) == 1
    assert told[0].startswith("fullest phase: publish,")
    assert "its KV cache can give way, so " in told[0]


def test_what_is_not_loaded_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert any("the MTP layer" in line and "is not loaded" in line for line in printed("deepseek-v4-pro", capsys))


def test_servers_are_shown_with_the_gpus_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert "servers: 1 of SGLang, 8 GPUs each (replicas, tensorParallel)" in printed("kimi-k2-6", capsys)
