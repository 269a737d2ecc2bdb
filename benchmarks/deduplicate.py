"""`agents.deduplicate` on 100,000 short texts, on one core, and against the quadratic definition on 2,000 of them.

    python -m benchmarks.deduplicate

Belongs here: time, and agreement at a size that would take tests too long. Does not belong here: the definition's edge
cases (`tests/unit_runtime/agents/test_near_duplicates.py`).

Three kinds of data: sentences of random words, every fifth one a copy with a character changed; one template with two
numbers, where every pair shares most of its trigrams; and lines composed of 200 sentences, one and a half times as
long, which share whole halves. Seconds are CPU time of this process.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Measured, run
from orbit_runtime.agents.near_duplicates import deduplicate, normal, trigrams

MEASURES = ("orbit_runtime/agents/near_duplicates.py",)
THRESHOLD, COUNT, SAMPLE = 0.9, 100_000, 2_000
TARGETS = {"seconds": 20.0, "agreement": 0.99}


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(2000)]
    made: list[str] = []
    for number in range(count):
        if number % 5 == 4:
            letters = list(draw.choice(made))
            letters[draw.randrange(len(letters))] = draw.choice("abcdefgh")
            made.append("".join(letters))
        else:
            made.append(" ".join(draw.choices(words, k=draw.randint(5, 10))))
    return made


def one_template(count: int) -> list[str]:
    draw = Random(1)
    return [
        f"What is {draw.randrange(10**4)} plus {draw.randrange(10**4)}? Answer with a number." for _ in range(count)
    ]


def put_together(count: int) -> list[str]:
    draw, parts = Random(2), sentences(200, seed=3)
    return [f"{draw.choice(parts)} {draw.randrange(1000)} {draw.choice(parts)[:20]}" for _ in range(count)]


def quadratic(texts: list[str]) -> tuple[list[str], int]:
    """The texts kept by the definition, and the number of pairs of near-duplicates."""
    sets = [trigrams(normal(text)) for text in texts]
    kept: list[int] = []
    pairs = 0
    for index, mine in enumerate(sets):
        near = [each for each in range(index) if _similarity(mine, sets[each]) >= THRESHOLD]
        pairs += len(near)
        if not set(near) & set(kept):
            kept.append(index)
    return [texts[each] for each in kept], pairs


def _similarity(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / len(a | b)


def measure(options: argparse.Namespace) -> Measured:
    count, sample = (500, 200) if options.smallest else (COUNT, SAMPLE)
    figures: dict[str, object] = {}
    for kind in (sentences, one_template, put_together):
        texts = kind(count)
        start = time.process_time()
        kept = deduplicate(texts, THRESHOLD)
        seconds = time.process_time() - start
        few = texts[:sample]
        wanted, pairs = quadratic(few)
        agreement = 1 - len(set(wanted) ^ set(deduplicate(few, THRESHOLD))) / max(1, pairs)
        name = kind.__name__.replace("_", " ")
        figures[name] = {
            "cpu_seconds": round(seconds, 2), "kept": len(kept), "near_pairs_in_sample": pairs,
            "agreement": round(agreement, 4),
        }  # fmt: skip
        print(f"{name:<14}{seconds:8.1f} s CPU  {len(kept)} of {count} kept  agreement {agreement:.4f} ({pairs} pairs)")
    return Measured(figures=figures, facts={"texts": count, "sample": sample, "threshold": THRESHOLD, **TARGETS})


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure))
