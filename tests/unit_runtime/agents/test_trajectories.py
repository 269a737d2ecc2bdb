"""Datasets: what is captured, and files that give back what was written."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit_runtime.agents import (
    DefaultStrategy,
    TrajectoryDataset,
    TrajectoryItem,
    TrajectoryStrategy,
    augment_add_noise,
    augment_swap_io,
    filter_by_score,
    split_dataset,
)
from orbit_runtime.errors import DataError, OrbitError, UsageError

TEXTS = [
    "",
    "ä 漢 🙂",
    "=1+1",
    "+1",
    "-1",
    "@x",
    "'quoted",
    "1",
    "null",
    "NaN",
    'a,b\n"c"\r\nd',
    "\ttab",
    "[1]",
    "\ud800",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.sampled_from(TEXTS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text() | st.sampled_from(["$float", "$tuple", "$object"]), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)
ITEMS = st.builds(
    TrajectoryItem,
    VALUES,
    VALUES,
    st.none() | st.floats(allow_nan=False),
    st.dictionaries(st.text(), VALUES, max_size=2),
)


@given(st.lists(ITEMS, max_size=4))
def test_json_and_csv_give_back_what_was_written(items: list[TrajectoryItem]) -> None:
    dataset = TrajectoryDataset(items=items)
    assert TrajectoryDataset.import_json(dataset.export_json()).items == items
    assert TrajectoryDataset.import_csv(dataset.export_csv()).items == items


def test_no_cell_is_a_formula_and_every_text_comes_back(tmp_path: Path) -> None:
    dataset = TrajectoryDataset(items=[TrajectoryItem(text, text, math.nan, {"t": (math.nan, text)}) for text in TEXTS])
    dataset.export_csv(tmp_path / "new" / "items.csv")
    dataset.export_json(tmp_path / "items.json")
    with (tmp_path / "new" / "items.csv").open(newline="", encoding="utf-8") as file:
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for row in csv.reader(file) for cell in row)
    read = TrajectoryDataset()
    assert read.import_csv(tmp_path / "new" / "items.csv") is read
    for back in (read, TrajectoryDataset.import_json(str(tmp_path / "items.json"))):
        assert [item.state for item in back] == TEXTS
        assert all(item.reward is not None and math.isnan(item.reward) for item in back)
        assert [item.metadata["t"][1] for item in back] == TEXTS
        assert all(math.isnan(item.metadata["t"][0]) for item in back)


def test_a_strategy_decides_what_is_kept_and_in_what_form() -> None:
    class Good(TrajectoryStrategy):
        def should_capture(self, item: TrajectoryItem) -> bool:
            return bool(item.reward)

        def process(self, item: TrajectoryItem) -> TrajectoryItem:
            return TrajectoryItem(item.state.upper(), item.action, item.reward)

    dataset = TrajectoryDataset(strategy=Good())
    assert dataset.capture(TrajectoryItem("a", "b", 0.0)) is None
    assert dataset.capture({"state": "a", "action": "b", "reward": 1.0}) == TrajectoryItem("A", "b", 1.0)
    assert (len(dataset), dataset.items) == (1, [TrajectoryItem("A", "b", 1.0)])
    assert DefaultStrategy().should_capture(TrajectoryItem("a"))


def test_an_async_strategy_is_refused() -> None:
    class Late(DefaultStrategy):
        async def should_capture(self, item: TrajectoryItem) -> bool:  # type: ignore[override]
            return True

    with pytest.raises(UsageError, match=r"strategy\.should_capture: this function is async"):
        TrajectoryDataset(strategy=Late())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", r"items\[0\]: a int is not a trajectory item"),
        ('[{"state": 1, "reward": "x"}]', "'x' is not a number"),
        ("[", "not JSON"),
    ],
)
def test_a_wrong_json_file_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        TrajectoryDataset.import_json(text)


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "state,action\n1\n", 'state,action\n"x', "\n"])
def test_a_wrong_csv_file_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(DataError, match="line"):
        TrajectoryDataset.import_csv(text)


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(DataError, match=r"items\[0\]\.metadata\.a\[1\]: a set cannot be written"):
        TrajectoryDataset(items=[TrajectoryItem("s", "a", 0.0, {"a": [1, {2}]})]).export_json()


DATA = [TrajectoryItem(f"state {i}", f"action {i}", i / 10) for i in range(10)]
DICTS = [{"input": f"in {i}", "output": i, "score": i / 10} for i in range(10)]


def test_swapping_twice_changes_nothing() -> None:
    for data in (DATA, DICTS):
        swapped = augment_swap_io(data)
        assert augment_swap_io(swapped) == data
        assert swapped != data
    assert augment_swap_io(DATA)[3] == TrajectoryItem("action 3", "state 3", 0.3)


def test_noise_is_seeded_and_only_in_what_was_seen() -> None:
    noisy = augment_add_noise(DATA, 0.1)
    assert noisy == augment_add_noise(DATA, 0.1) != augment_add_noise(DATA, 0.1, seed=1)
    assert all(
        a.state != b.state and (a.action, a.reward) == (b.action, b.reward) for a, b in zip(DATA, noisy, strict=True)
    )
    assert augment_add_noise(DATA, 0) == DATA
    (numbers,) = augment_add_noise([{"state": [1.0, 100.0, True], "action": 1}], 0.01)
    assert numbers["state"][2] is True
    assert 0 < abs(numbers["state"][1] - 100.0) < 10
    assert augment_add_noise(DICTS, 0.5)[0]["output"] == 0


def test_only_items_with_the_score_pass() -> None:
    assert filter_by_score(DATA, 0.5) == DATA[5:]
    assert filter_by_score(DICTS, 0.9) == DICTS[9:]
    assert filter_by_score([{"score": None}, {"reward": math.nan}, {"reward": 1}], 0) == [{"reward": 1}]
    with pytest.raises(DataError, match=r"data\[0\]: there is no score"):
        filter_by_score([{"a": 1}], 0)


def test_a_split_is_seeded_whole_and_leaves_its_input() -> None:
    train, test = split_dataset(DATA, [0.8, 0.2])
    assert (len(train), len(test)) == (8, 2)
    assert sorted(train + test, key=lambda item: item.reward) == DATA
    assert (train, test) == split_dataset(TrajectoryDataset(items=DATA), (0.8, 0.2))
    assert train != split_dataset(DATA, [0.8, 0.2], seed=1)[0]
    named = split_dataset(DICTS, {"train": 0.5, "rest": 0.5})
    assert {name: len(part) for name, part in named.items()} == {"train": 5, "rest": 5}


@pytest.mark.parametrize("ratios", [[0.5, 0.4], [0.9, 0.2], [1.5, -0.5], [], "ab", [math.nan, 1.0]])
def test_ratios_that_are_none_are_refused(ratios: list[float]) -> None:
    with pytest.raises(UsageError, match="ratios"):
        split_dataset(DATA, ratios)


@pytest.mark.parametrize("level", [-0.1, 1.1, math.nan, True])
def test_a_noise_level_out_of_range_is_refused(level: float) -> None:
    with pytest.raises(OrbitError, match="noise_level"):
        augment_add_noise(DATA, level)
