"""Charts: scales, gaps and text."""

from __future__ import annotations

import json
import math
from html import unescape
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbit_runtime.observability.plots import MAX_POINTS, Series, _tick, draw_lines, draw_stack

NUMBERS = st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=40)


@given(NUMBERS, st.booleans())
def test_any_numbers_make_a_well_formed_drawing_inside_its_frame(values: list[float | None], log: bool) -> None:
    svg = draw_lines("loss", range(len(values)), [Series("loss", values)], log=log)
    if not any(value is not None and math.isfinite(value) for value in values):
        assert svg == ""
        return
    root = ElementTree.fromstring(svg)
    for circle in root.iter("circle"):
        assert 0 <= float(circle.get("cy", "nan")) <= 200


@pytest.mark.parametrize("value", [3 / 8, 11 / 12, 15 / 16, -1.95])
def test_numbers_that_differ_in_their_last_bits_are_a_level_line(value: float) -> None:
    """Means of the same rewards, weighted in another order."""
    assert "<path" in draw_lines("reward", [1, 2], [Series("reward", [value, value + math.ulp(value)])])


@pytest.mark.parametrize("log", [False, True])
def test_zeros_alone_are_shown_as_zeros(log: bool) -> None:
    """Two sides that are equal to the bit in every step are not 1e-9 apart."""
    svg = draw_lines("parity", [1, 2], [Series("mean", [0.0, 0.0])], log=log)
    assert "1e-" not in svg
    assert ">0</text>" in svg


def test_a_missing_number_is_a_gap_and_not_a_zero() -> None:
    svg = draw_lines("loss", [1, 2, 3, 4, 5], [Series("loss", [1.0, 2.0, math.nan, 2.0, 1.0])])
    path = next(element.get("d", "") for element in ElementTree.fromstring(svg).iter("path"))
    assert path.count("M") == 2


def test_names_are_escaped() -> None:
    svg = draw_lines('<t"', [1, 2], [Series("<script>", [1.0, 2.0])])
    assert "<script>" not in svg
    ElementTree.fromstring(svg)


def test_a_long_run_is_thinned_and_keeps_both_ends() -> None:
    steps = list(range(1, 10_001))
    svg = draw_lines("x", steps, [Series("x", [float(step) for step in steps])])
    assert svg.count("L") <= 3 * MAX_POINTS
    assert "step 1<" in svg
    assert "step 10000<" in svg
    assert "highest 1e+04" in svg


def test_layers_stand_on_each_other() -> None:
    svg = draw_stack("seconds", [1, 2], [Series("a", [1.0, 1.0]), Series("b", [3.0, None], 1)])
    lower, upper = [element.get("d", "") for element in ElementTree.fromstring(svg).iter("path")]
    assert lower.split(" L")[0].removeprefix("M") in upper.replace("Z", "")


def test_of_a_long_run_a_point_is_the_mean_of_its_steps_and_the_shade_holds_the_lowest_and_highest() -> None:
    steps = list(range(1, 10_001))
    svg = draw_lines("x", steps, [Series("x", [100.0 if step == 5000 else 1.0 for step in steps])])
    points = json.loads(unescape(svg.split("data-points='")[1].split("'")[0]))
    (name, values, _, (low, high)) = points["s"][0]
    at = next(index for index, end in enumerate(points["x"]) if end >= 5000)
    count = points["x"][at] - points["from"][at] + 1
    assert name == "x"
    assert values[at] == pytest.approx(1 + 99 / count, rel=1e-4)
    assert (low[at], high[at]) == (1.0, 100.0)
    assert "highest 100" in svg


def test_a_deviation_is_a_shade_that_leaves_the_line_half_of_the_height() -> None:
    band = ([-10.0, -10.0, -10.0], [10.0, 10.0, 10.0])
    svg = draw_lines("x", [1, 2, 3], [Series("x", [0.0, 10.0, 20.0], 0, band)])
    root = ElementTree.fromstring(svg)
    assert [element.get("class") for element in root.iter("path")] == ["band c0", "line c0"]
    assert float(root.get("data-low", "nan")) >= -10


def test_the_interval_of_a_single_value_is_within_its_axis() -> None:
    root = ElementTree.fromstring(draw_lines("x", [0], [Series("x", [0.253], 0, ([0.209], [0.297]))]))
    low, high = (float(root.get(f"data-{end}", "nan")) for end in ("low", "high"))
    assert low <= 0.209 < 0.297 <= high


def test_a_share_has_no_axis_beyond_1() -> None:
    svg = draw_lines("share", [1, 2], [Series("share", [1.0, 1.0])], most=1.0)
    assert 'data-high="1.0"' in svg


def test_nothing_to_draw_is_no_chart() -> None:
    assert draw_lines("x", [], [Series("x", [])]) == ""
    assert draw_stack("x", [1], [Series("x", [None])]) == ""


def test_a_tick_says_the_number_that_it_stands_at() -> None:
    values = (0.00025, 0.00075, 2.5e-5, 1.25e5, 2.5e5, 5e-4, 0.0, 0.25, 250.0)
    assert [float(_tick(each)) for each in values] == list(values)
