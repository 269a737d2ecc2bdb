"""`deduplicate` against its quadratic definition."""

from __future__ import annotations

from random import Random

import pytest

from orbit_runtime.agents import TrajectoryItem, deduplicate
from orbit_runtime.errors import UsageError


def trigrams(text: str) -> set[str]:
    padded = "\n" + " ".join(text.lower().split()) + "\n"
    return {padded[i : i + 3] for i in range(max(1, len(padded) - 2))}


def quadratic(texts: list[str], threshold: float) -> list[str]:
    kept: list[tuple[str, set[str]]] = []
    for text in texts:
        mine = trigrams(text)
        if not any(len(mine & other) / len(mine | other) >= threshold for _, other in kept):
            kept.append((text, mine))
    return [text for text, _ in kept]


def sentences(count: int) -> list[str]:
    draw = Random(7)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 7))) for _ in range(60)]
    made: list[str] = []
    for _ in range(count):
        if made and draw.random() < 0.5:
            letters = list(draw.choice(made))
            letters[draw.randrange(len(letters))] = draw.choice("xyz ")
            made.append("".join(letters))
        else:
            made.append(" ".join(draw.choices(words, k=draw.randint(1, 9))))
    return made


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_the_join_is_the_quadratic_definition(threshold: float) -> None:
    texts = sentences(500)
    kept = deduplicate(texts, threshold)
    assert kept == quadratic(texts, threshold)
    assert len(kept) < len(texts)


def test_items_and_dicts_are_compared_without_their_scores() -> None:
    items = [
        TrajectoryItem("What is the capital of France?", "Paris", 1.0),
        TrajectoryItem("what is  the capital of France", "Paris", 0.0),
        TrajectoryItem("Name a prime number", "7", 1.0),
        TrajectoryItem("What is the capital of France?", "Paris", 0.5),
    ]
    assert deduplicate(items, 0.8) == [items[0], items[2]]
    dicts = [{"q": 1, "score": 1}, {"q": 1, "score": 2}, {"q": 23456, "score": 1}]
    assert deduplicate(dicts, 1.0) == [dicts[0], dicts[2]]
    assert deduplicate([], 0.5) == []


@pytest.mark.parametrize("threshold", [0, 1.1, -1, float("nan"), "0.5"])
def test_a_threshold_out_of_range_is_refused(threshold: float) -> None:
    with pytest.raises(UsageError, match="threshold"):
        deduplicate(["a"], threshold)
