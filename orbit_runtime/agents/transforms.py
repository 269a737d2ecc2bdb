"""Functions from data to new data. Each takes trajectory items and plain dicts, does not change its input, and uses a
seed for random draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any, overload

from orbit_runtime.agents.checks import check_items, check_number
from orbit_runtime.agents.items import changed, get, pair_keys, score_of, seen_key
from orbit_runtime.errors import UsageError
from orbit_runtime.seeds import stream_key


def augment_add_noise(data: Iterable[Any], noise_level: float = 0.1, *, seed: int = 0) -> list[Any]:
    """A copy of each item with noise in the state (`state`, or a dict's `input` or `prompt`).

    Texts get a misspelling in this fraction of their characters, at least one; numbers, also in lists and dicts, a
    Gaussian error of this fraction of their magnitude (of 1, if they are smaller). Action and score stay.

    Args:
        noise_level: 0 to 1; with 0 nothing changes.
    """
    check_number("noise_level", noise_level, low=0, high=1)
    noisy = []
    for index, item in enumerate(check_items(data, "data")):
        key = seen_key(item, f"data[{index}]")
        noisy.append(changed(item, **{key: _noisy(get(item, key), noise_level, Random(stream_key(seed, "n", index)))}))
    return noisy


def augment_swap_io(data: Iterable[Any]) -> list[Any]:
    """Each item with state and action exchanged; in a dict, also input and output, or prompt and completion."""
    swapped = []
    for index, item in enumerate(check_items(data, "data")):
        seen, done = pair_keys(item, f"data[{index}]")
        swapped.append(changed(item, **{seen: get(item, done), done: get(item, seen)}))
    return swapped


def filter_by_score(data: Iterable[Any], min_score: float) -> list[Any]:
    """The items whose reward (a dict's `score`, or else `reward`) is `min_score` or more; items without a score are
    dropped."""
    check_number("min_score", min_score, low=-math.inf)
    scored = [(item, score_of(item, f"data[{index}]")) for index, item in enumerate(check_items(data, "data"))]
    return [item for item, score in scored if score is not None and score >= min_score]


@overload
def split_dataset(data: Iterable[Any], ratios: Mapping[str, float], *, seed: int = 0) -> dict[str, list[Any]]: ...
@overload
def split_dataset(data: Iterable[Any], ratios: Sequence[float], *, seed: int = 0) -> tuple[list[Any], ...]: ...
def split_dataset(
    data: Iterable[Any], ratios: Sequence[float] | Mapping[str, float], *, seed: int = 0
) -> tuple[list[Any], ...] | dict[str, list[Any]]:
    """Divides the items at random, each into one part; sizes match the ratios to within one item.

    Args:
        ratios: one for each part, adding up to 1: `[0.8, 0.2]`, or with names `{"train": 0.8, "test": 0.2}`, which the
            result then has too.
    """
    items = check_items(data, "data")
    if isinstance(ratios, str) or not isinstance(ratios, Sequence | Mapping) or not ratios:
        raise UsageError(f"{ratios!r} are not ratios", where="ratios", fix="give a list such as [0.8, 0.2]")
    shares = list(ratios.values()) if isinstance(ratios, Mapping) else list(ratios)
    for index, share in enumerate(shares):
        check_number(f"ratios[{index}]", share, low=0, high=1)
    if abs(math.fsum(shares) - 1) > 1e-6:
        raise UsageError(
            f"the ratios add up to {math.fsum(shares):g}, not to 1",
            where="ratios",
            fix="change one of them: [0.8, 0.2]",
        )
    order = list(range(len(items)))
    Random(stream_key(seed, "split")).shuffle(order)
    bounds = [round(math.fsum(shares[:end]) * len(items)) for end in range(len(shares) + 1)]
    bounds[-1] = len(items)
    parts = tuple([items[index] for index in order[a:b]] for a, b in pairwise(bounds))
    return dict(zip(ratios, parts, strict=True)) if isinstance(ratios, Mapping) else parts


def _noisy(value: Any, level: float, draw: Random) -> Any:
    if level == 0 or value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value + draw.gauss(0, level * max(1.0, abs(value))) if math.isfinite(value) else value
    if isinstance(value, str):
        return _misspelt(value, level, draw)
    if isinstance(value, list | tuple):
        return type(value)(_noisy(each, level, draw) for each in value)
    if isinstance(value, dict):
        return {key: _noisy(each, level, draw) for key, each in value.items()}
    return value


def _misspelt(text: str, level: float, draw: Random) -> str:
    """Each error drops a character, doubles it, or replaces it by another character of the text."""
    letters = list(text)
    for place in draw.sample(range(len(letters)), min(len(letters), max(1, round(level * len(letters))))):
        others = sorted(set(text) - {text[place]})
        letters[place] = draw.choice(["", text[place] * 2, *([draw.choice(others)] if others else [])])
    return "".join(letters)
