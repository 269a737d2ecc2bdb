"""What the processes of one server tell of a pass, put together as one snapshot."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from orbit_runtime.adapters.tensorfile import dump
from orbit_runtime.errors import GateError
from orbit_runtime.policy.snapshot import SnapshotPart
from orbit_runtime.rollout.taps import ANSWER, REQUEST, SEEN, asked_pass, build_snapshot

ROWS = 3
QUERY, KEY, OUT, NORM = (torch.randn(ROWS + 1, size) for size in (8, 4, 6, 6))


def answer(rank: int, *, is_summed: bool) -> bytes:
    """Of four ranks, with two heads of keys."""
    points: dict[str, Tensor] = {"q": QUERY.chunk(4, 1)[rank], "o": OUT if is_summed else OUT * (rank + 1) / 10}
    shares: dict[str, tuple[str, int]] = {"q": ("part", rank), "o": ("summand", rank), "n": ("whole", 0)}
    shares["k"] = ("part", rank // 2)
    if rank % 2 == 0:
        points["k"] = KEY.chunk(2, 1)[rank // 2]
    if rank == 0:
        points["n"] = NORM
    facts = {"shares": json.dumps(shares), "order": json.dumps(["n", "q", "k", "o"]), "absent": "[]"}
    facts["parts"] = json.dumps({"w": [f"digest {rank}", [2, 5], 0, 2 * rank], "n": ["same", [6], 0, 0]})
    return dump({f"point:{name}": each for name, each in points.items()}, torch.float32, facts)


@pytest.mark.parametrize("is_summed", [False, True])
def test_parts_stand_beside_each_other_and_summands_are_summed_up_once(is_summed: bool) -> None:
    made = build_snapshot([answer(rank, is_summed=is_summed) for rank in range(4)], ROWS, values=lambda names: [])
    assert list(made.points) == ["n", "q", "k", "o"]
    for name, whole in (("n", NORM), ("q", QUERY), ("k", KEY), ("o", OUT)):
        torch.testing.assert_close(made.points[name], whole[:ROWS])
    assert made.tensors["w"] == tuple(SnapshotPart(f"digest {rank}", (2, 5), 0, 2 * rank, rank) for rank in range(4))
    assert made.tensors["n"] == tuple(SnapshotPart("same", (6,), 0, 0, rank) for rank in range(4))


def test_values_are_asked_for_again_and_come_from_every_process_that_holds_a_part() -> None:
    def values(names: object) -> list[bytes]:
        assert names == ("w",)
        return [dump({"value:w": torch.full((2, 5), float(rank))}, torch.float32) for rank in range(4)]

    made = build_snapshot([answer(rank, is_summed=True) for rank in range(4)], ROWS, values=values)
    assert [part.unique().tolist() for part in made.values(("w",))["w"]] == [[0.0], [1.0], [2.0], [3.0]]


def test_a_process_that_could_not_tell_its_pass_is_no_snapshot() -> None:
    broken = dump({}, torch.float32, {"error": "RuntimeError: out of memory"})
    with pytest.raises(GateError, match="cannot tell rank 1's pass: RuntimeError: out of memory"):
        build_snapshot([answer(0, is_summed=True), broken], ROWS, values=lambda names: [])


def test_an_answer_that_comes_later_is_waited_for_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / ANSWER.format(rank=1)).write_bytes(b"of an earlier pass")
    with asked_pass(tmp_path, [1, 2], None, (), 2) as told:
        assert (tmp_path / REQUEST).exists()
        for rank in range(2):
            (tmp_path / SEEN.format(rank=rank)).touch()
        (tmp_path / ANSWER.format(rank=0)).write_bytes(b"first")
        (tmp_path / "written").write_bytes(b"second")
        late = threading.Timer(0.2, lambda: (tmp_path / "written").rename(tmp_path / ANSWER.format(rank=1)))
        late.start()
        assert told() == [b"first", b"second"]
        late.join()
    assert list(tmp_path.iterdir()) == []


def test_no_answer_is_not_waited_for(tmp_path: Path) -> None:
    with asked_pass(tmp_path, [1, 2], None, (), 2) as told, pytest.raises(FileNotFoundError):
        told()
