"""What `run.json` keeps of the places where a run was computed, and what a resume or a replay says of it."""

from __future__ import annotations

from orbit_runtime.sides.machine import add_rounding_facts, explain_rounding

TWO = {"threads": "2", "processor": "A", "torch": "2.14.1"}
ONE = TWO | {"threads": "1"}
OTHER = TWO | {"processor": "B"}


def test_a_place_is_kept_once_and_each_change_of_place_again() -> None:
    kept: list = []
    for facts in (TWO, TWO, ONE, TWO, TWO):
        kept = add_rounding_facts(kept, facts)
    assert kept == [TWO, ONE, TWO]


def test_what_differs_is_told_with_both_values_and_once() -> None:
    assert explain_rounding([TWO, TWO], TWO) == []
    assert explain_rounding([ONE, TWO], TWO) == ["threads: 1 then, 2 now"]
    assert explain_rounding([ONE, OTHER, ONE], TWO) == ["threads: 1 then, 2 now", "processor: B then, A now"]
    assert explain_rounding([TWO | {"gpu": "H100"}], TWO) == ["gpu: H100 then, none now"]


def test_a_run_that_recorded_nothing_is_told_as_that() -> None:
    assert explain_rounding([], TWO) == ["threads and processor of the run were not recorded"]
