"""Which path a product takes, the override, the one log line; choosing tile sizes. No kernel runs here."""

from __future__ import annotations

import itertools
import logging
import sysconfig
from pathlib import Path

import pytest
import torch

from orbit_runtime.errors import UsageError
from orbit_runtime.quant.kernels import choice
from orbit_runtime.quant.kernels.choice import parse_override, select_path, triton_lacks, why_not
from orbit_runtime.quant.kernels.launch import Tiles, candidates, fitting, quickest, tuned

CPU = torch.device("cpu")
TILES = (Tiles(16, 64, 64), Tiles(64, 64, 64), Tiles(128, 64, 64))


class OutOfResources(Exception):
    """Named as Triton's, which only a device raises."""


@pytest.mark.parametrize("asked", ["", "Auto", "Fused", "Dequantize"])
def test_a_cpu_always_takes_torch(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, asked)
    for layout, grouped in itertools.product(["BF16", "INT4", "NVFP4"], [True, False]):
        assert select_path(layout, CPU, torch.bfloat16, 4096, grouped=grouped) == "Torch"


def test_a_device_that_lacks_an_instruction_is_named() -> None:
    assert why_not("INT4", (8, 0), None) is None
    assert why_not("MXFP4", (8, 0), None) is None
    assert why_not("FP8BlockV4", (8, 0), None) == "compute capability 8.0 is below 8.9"
    assert why_not("NVFP4ModelOpt", (8, 6), None) == "compute capability 8.6 is below 8.9"
    assert why_not("NVFP4", (9, 0), None) is None
    assert why_not("INT4", (7, 5), None) == "compute capability 7.5 is below 8.0"
    assert why_not("INT4", (9, 0), "Triton is not installed") == "Triton is not installed"


def test_without_a_c_compiler_or_pythons_headers_a_packed_base_takes_torch_and_the_reason_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert triton_lacks.__wrapped__() == "Triton finds no C compiler: install gcc"
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    assert triton_lacks.__wrapped__() == "Triton finds no Python.h: install Python's headers (python3-dev)"
    (tmp_path / "Python.h").touch()
    assert triton_lacks.__wrapped__() is None


@pytest.mark.parametrize("asked", ["Torch", "Dequantize", "Fused"])
def test_the_override_is_one_of_three_words(asked: str) -> None:
    assert parse_override(asked) == asked
    assert parse_override("Auto") is parse_override("") is None


def test_any_other_word_is_an_error_that_lists_them() -> None:
    with pytest.raises(UsageError, match="'fused'") as caught:
        parse_override("fused")
    assert caught.value.where == "ORBIT_KERNELS"
    assert caught.value.exit_code == 64
    assert "Torch, Dequantize, Fused" in str(caught.value)


def test_half_a_tile_of_nothing_is_not_tried() -> None:
    assert candidates(TILES, 16) == [TILES[0]]
    assert candidates(TILES, 1) == [TILES[0]]
    assert candidates(TILES, 64) == list(TILES[:2])
    assert fitting(TILES, 100) == TILES[1]
    assert fitting(TILES, 2) == TILES[0]


def test_the_quickest_wins_and_one_that_does_not_fit_the_device_is_passed_over() -> None:
    ran: list[Tiles] = []

    def run(tiles: Tiles) -> None:
        ran.append(tiles)
        if tiles.tokens == 128:
            raise OutOfResources

    def measure(function: object) -> float:
        function()  # type: ignore[operator]
        return {16: 2.0, 64: 1.0}[ran[-1].tokens]

    assert quickest(TILES, run, measure) == TILES[1]
    assert ran == list(TILES)


def test_a_choice_that_does_not_compile_is_passed_over_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def run(tiles: Tiles) -> None:
        if tiles.tokens == 64:
            raise RuntimeError("PassManager::run failed")

    with caplog.at_level(logging.INFO):
        found = quickest(TILES, run, lambda function: function() or 0.0)  # type: ignore[func-returns-value]
    assert found == TILES[0]
    assert "tokens=64" in caplog.text
    assert "PassManager::run failed" in caplog.text


def test_the_first_choice_is_taken_where_there_is_no_memory_for_measuring() -> None:
    def run(tiles: Tiles) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB")

    assert quickest(TILES, run, lambda function: function() or 0.0) == TILES[0]  # type: ignore[func-returns-value]


@pytest.mark.parametrize("error", [ValueError("wrong"), RuntimeError("CUDA error: an illegal memory access")])
def test_a_failure_of_every_choice_and_a_fault_of_the_device_are_not_swallowed(error: Exception) -> None:
    tried = []

    def run(tiles: Tiles) -> None:
        tried.append(tiles)
        raise error

    with pytest.raises(type(error), match=str(error)):
        quickest(TILES, run, lambda function: function() or 0.0)  # type: ignore[func-returns-value]
    assert len(tried) == (len(TILES) if isinstance(error, ValueError) else 1)


def test_nothing_is_measured_where_that_is_not_wanted() -> None:
    assert tuned("key", 65, TILES, lambda tiles: pytest.fail("ran"), measures=False) == TILES[2]


@pytest.mark.gpu
def test_a_choice_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    choice._select.cache_clear()
    device = torch.device("cuda", 0)
    with caplog.at_level(logging.INFO, logger=choice.__name__):
        paths = [select_path("INT4", device, torch.bfloat16, tokens) for tokens in (1, 2, 5000, 6000)]
    assert paths == ["Fused", "Fused", "Dequantize", "Dequantize"]
    assert len(caplog.records) == 2
    assert select_path("INT4", device, torch.float32, 1) == "Torch"
