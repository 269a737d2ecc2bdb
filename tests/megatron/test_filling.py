"""Where ranks write their parts of a file: windows, runs, and ranks that cannot reach the memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from orbit_runtime.adapters.buffer import AdapterBuffer, MemoryOpening, opened, opening_of, publishable
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.masters import MasterPlace
from orbit_runtime.adapters.part import WeightPart
from orbit_runtime.errors import InternalError
from orbit_runtime.policy import load_policy
from orbit_runtime.training import TorchTrainer
from orbit_runtime.training.megatron import outline, trainer
from orbit_runtime.training.megatron.groups import GroupSizes
from orbit_runtime.training.megatron.outline import (
    DividedFile,
    FileWindow,
    HeldParameter,
    TensorEntry,
    build_divided,
    held_runs,
)
from orbit_runtime.training.megatron.rank import RankSettings
from orbit_runtime.training.megatron.trainer import MegatronTrainer
from tests.fakes.held_state import hold_state
from tests.megatron.cases import folder_of
from tests.megatron.ranks import World, world
from tests.megatron.test_trainer import TRAINING, step
from tests.megatron.trainers import WorldRanks, rank_here
from tests.models.family_matrix import Case, adapter_of

CASES = (Case("qwen3_moe", "INT4", "LoRA", "PerExpert"), Case("qwen3_moe", "BF16", "OFT", "SharedOuter"))
PARTS = (
    WeightPart(rows=slice(2, 4), shape=(6, 8)),
    WeightPart(columns=slice(4, 8), shape=(6, 8)),
    WeightPart(shape=(6, 8)),
    WeightPart(experts=slice(1, 3), shape=(6, 8), num_experts=4, group="expert"),
    WeightPart(rows=slice(3, 6), experts=slice(2, 4), shape=(6, 8), num_experts=4, group="expert"),
    WeightPart(columns=slice(0, 4), experts=slice(0, 1), shape=(6, 8), num_experts=4, group="expert"),
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with world(GroupSizes(2, tensor=2, expert=2, sequence_parallel=True)) as made:
        yield made


@pytest.mark.parametrize("limit", [1, 40, 100, 1000])
def test_windows_are_all_of_a_file_in_order(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outline, "PIECE_BYTES", 16)
    shapes = {"a": (3,), "b": (5, 4), "c": (1,), "d": (40,), "e": (2, 2)}
    file = build_divided(
        [TensorEntry(name, "master", name, None, shape) for name, shape in shapes.items()], torch.float32
    )
    starts = dict(zip(shapes, np.cumsum(file.sizes)[:-1].tolist(), strict=True))
    windows = list(file.windows(limit))
    assert windows[0].start == len(file.header)
    assert all(one.start + one.size == other.start for one, other in pairwise(windows))
    assert windows[-1].start + windows[-1].size == sum(file.sizes)
    assert all(len(window.pieces) == 1 or window.size <= limit for window in windows)
    # Every piece is one of the file's, and every tensor in a window lies where the file has it.
    wanted = [min(16, size - done) for size in file.sizes[1:] for done in range(0, size, 16)]
    assert [piece for window in windows for piece in window.pieces] == wanted
    for window in windows:
        end = window.start + window.size
        inside = [
            name for name in shapes if starts[name] < end and starts[name] + 4 * math.prod(shapes[name]) > window.start
        ]
        assert {spot.key: window.start + spot.position for spot in window.spots} == {
            name: starts[name] for name in inside
        }


@pytest.mark.parametrize(
    ("part", "by_row"), [(part, by_row) for part in PARTS for by_row in (False, True)[: 1 + bool(part.num_experts)]]
)
@pytest.mark.parametrize("kind", ["lora_A", "lora_B", "oft_R"])
def test_runs_are_where_cutting_finds_the_values(part: WeightPart, kind: str, by_row: bool) -> None:
    inner = {"lora_A": (3, 8), "lora_B": (6, 3), "oft_R": (2, 6)}[kind]
    shape = (part.num_experts, *inner) if part.num_experts else inner
    whole = torch.arange(math.prod(shape)).view(shape)
    runs, expected = held(part, kind, shape, by_row=by_row), part.cut(kind, whole, block_size=4)
    rows = whole if by_row else whole[None]
    kept = expected if by_row else expected[None]
    for number, row in enumerate(runs.rows if runs.rows is not None else range(1)):
        flat = rows[row].reshape(-1)
        found = torch.cat([flat[first : first + runs.length] for first in runs.starts.tolist()])
        assert torch.equal(found, kept[number].reshape(-1))
        assert runs.num_values == kept[number].numel()


def held(part: WeightPart, kind: str, shape: tuple[int, ...], *, by_row: bool) -> outline.Runs:
    names = tuple(f"e{index}" for index in range(part.num_experts or 1))
    given = HeldParameter(MasterPlace(kind, part, shape), "layer", names)
    return held_runs("master", given, AdapterConfig("OFT", (), block_size=4), by_row=by_row)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_windows_that_begin_within_a_tensor_and_ranks_elsewhere_give_the_same_files(
    ranks: World, tmp_path_factory: pytest.TempPathFactory, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path_factory.mktemp("models")
    policy, many = load_policy(folder_of(root, case), adapter_of(case)), on_ranks(ranks, root, case)
    one = TorchTrainer(policy, TRAINING)
    with policy.injected.masters.probing("random", 5), many.probing("random", 5):
        published, tokens = publishable(one, 1), (5, 9, 3, 77, 20, 31)
        score = many.score(tokens)[0].applied_digest
        assert publishable(many, 1).digest == published.digest
        assert score == one.score(tokens)[0].applied_digest

        # A window for each piece.
        monkeypatch.setattr(DividedFile, "windows", windows_of(1))
        assert publishable(many, 1).digest == published.digest
        assert many.score(tokens)[0].applied_digest == score

        # No rank finds the memory: it is on another machine.
        honest = trainer.opening_of
        elsewhere = lambda memory: MemoryOpening(honest(memory).path, "/memfd:of another machine (deleted)")  # noqa: E731
        monkeypatch.setattr(trainer, "opening_of", elsewhere)
        assert publishable(many, 1).digest == published.digest
        assert many.score(tokens)[0].applied_digest == score

        # Windows that end within tensors, and within the rows of a part.
        state = hold_state(one)
        monkeypatch.setattr(outline, "PIECE_BYTES", 600)
        assert hold_state(many) == state
        monkeypatch.setattr(trainer, "opening_of", honest)
        assert hold_state(many) == state


@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_state_is_taken_from_windows_that_end_within_tensors(
    ranks: World, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, is_elsewhere: bool
) -> None:
    many = on_ranks(ranks, tmp_path_factory.mktemp("models"), CASES[0])
    untrained = hold_state(many)
    step(many, 0)
    trained = hold_state(many)
    monkeypatch.setattr(outline, "PIECE_BYTES", 600)
    monkeypatch.setattr(DividedFile, "windows", windows_of(1000))
    if is_elsewhere:
        monkeypatch.setattr(trainer, "opening_of", lambda memory: MemoryOpening("/proc/self/mem", "/memfd:elsewhere"))
    many.score((5, 9, 3, 77))
    step(many, 1)
    after = hold_state(many)
    assert after != trained
    for state in (trained, untrained, after):
        many.load_state(state)
        assert hold_state(many) == state
    many.load_state(trained)
    step(many, 1)
    assert hold_state(many) == after, "the moments are as they were"


@pytest.mark.timeout(900)
def test_a_rank_that_writes_too_little_ends_the_publish(ranks: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    many = on_ranks(ranks, tmp_path_factory.mktemp("models"), CASES[0])
    ranks.call(write_nothing, 1)
    with pytest.raises(InternalError, match=r"the ranks wrote [0-9]+ bytes of [0-9]+, from model\.layers\.0"):
        publishable(many, 1)


def write_nothing(groups: object, rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        rank_here()._holdings["policy"].owns = lambda key: False  # type: ignore[method-assign]


def test_memory_that_was_given_back_is_not_written_to() -> None:
    memory = AdapterBuffer()
    opening = opening_of(memory)
    with opened(opening, os.O_WRONLY) as descriptor:
        assert os.readlink(f"/proc/self/fd/{descriptor}") == opening.title
    del memory
    with pytest.raises(OSError, match=r"given back|No such file"), opened(opening, os.O_WRONLY):
        pass


def windows_of(limit: int) -> Callable[..., Iterator[FileWindow]]:
    honest = DividedFile.windows
    return lambda file, _asked=0: honest(file, limit)


def on_ranks(ranks: World, root: Path, case: Case) -> MegatronTrainer:
    settings = RankSettings(folder_of(root, case), adapter_of(case), ranks.sizes, TRAINING)
    return MegatronTrainer(WorldRanks(ranks, settings), TRAINING.base_model)
