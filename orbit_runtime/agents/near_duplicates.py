"""`deduplicate`: removes items that are nearly the same as an earlier one.

Two texts are near-duplicates when the sets of their trigrams (case and white space folded) have a Jaccard similarity of
`threshold` or more. Nothing is approximated. Candidates come from two filters that miss no near-duplicate: parts of the
sets, of which one must be equal (Arasu et al., Efficient Exact Set-Similarity Joins, 2006), and, for parts that are not
selective, prefixes of the rarest tokens (Bayardo et al., Scaling Up All Pairs Similarity Search, 2007), long enough to
share several (Wang et al., Can We Beat the Prefix Filtering?, 2012). Every candidate is verified: first by signatures
of several hundred bits, in which each differing bit means a trigram that only one of the two has, then by the sets.

Belongs here: the join. Does not belong here: what an item's text is (`items`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache, reduce
from itertools import chain, combinations, count
from math import ceil, comb
from operator import or_
from random import Random
from typing import Any

from orbit_runtime.agents.items import check_items, check_number, text_of

_MOST_KEYS = 30
"""Most index keys of one prefix: more keys are rarer, so fewer candidates are verified, but take more memory."""
_CROWD = 200
"""Most sets with the same part: beyond this, comparing them all costs more than the keys of a prefix."""
_LEAST_PART = 2
"""Least mean number of tokens in a part; smaller parts are equal too often."""
_SIGNATURE_BITS = 509
"""Several times an item's trigrams, so that few share a bit, but no more, as each word costs time to compare."""
_SLACK = 1e-9
"""Tolerance for rounding: a similarity of exactly the threshold counts."""

_Entry = tuple[int, tuple[int, ...]]
"""A kept item's signature and set."""


def deduplicate(data: Iterable[Any], threshold: float = 0.9) -> list[Any]:
    """Keeps an item unless an earlier kept one is a near-duplicate; the order is preserved.

    Args:
        data: trajectory items (state and action are compared), plain dicts (all but `reward`, `score`, `metadata`) or
            texts.
        threshold: Jaccard similarity of trigrams, above 0, at most 1.
    """
    check_number("threshold", threshold, low=0, high=1, above=True)
    items = check_items(data, "data")
    texts = [normal(text_of(item, f"data[{index}]")) for index, item in enumerate(items)]
    first = {text: index for index, text in reversed(list(enumerate(texts)))}
    distinct = [index for index, text in enumerate(texts) if first[text] == index]
    kept = _Kept((trigrams(texts[index]) for index in distinct), threshold)
    return [items[index] for place, index in enumerate(distinct) if kept.add(place)]


def normal(text: str) -> str:
    return " ".join(text.casefold().split())


def trigrams(text: str) -> frozenset[str]:
    """Trigrams of a normalised text between two line breaks, which it cannot contain itself."""
    padded = f"\n{text}\n"
    return frozenset([padded[start : start + 3] for start in range(max(1, len(padded) - 2))])


class _Kept:
    """Sets of tokens of which no two are near-duplicates.

    Two near-duplicates differ in at most `parts - 1` tokens: if all existing tokens are dealt to `parts` parts, the two
    sets are equal in one. If too many sets have that part, such as one of a template's own words, the prefix is used
    instead. Of n tokens of which at least o must be shared, the n - o + depth rarest contain `depth` shared ones.
    """

    def __init__(self, sets: Iterable[frozenset[str]], threshold: float) -> None:
        self._threshold = threshold
        self._parts, self._depth = cache(self._find_parts), cache(self._find_depth)
        self._parts_near = cache(lambda size: sorted({*map(self._parts, self._sizes_near(size))}))
        self._depths_near = cache(lambda size: sorted({*map(self._depth, self._sizes_near(size))}))
        numbers: defaultdict[str, int] = defaultdict(count().__next__)
        numbered = [[numbers[token] for token in each] for each in sets]
        frequency = Counter(chain.from_iterable(numbered))
        order = sorted(frequency, key=lambda number: (frequency[number], number))
        ranks = [0] * len(order)
        for rank, number in enumerate(order):
            ranks[number] = rank
        # Tuples, here and below: the garbage collector passes over those that hold only numbers.
        self._sets = [tuple(sorted([ranks[number] for number in each])) for each in numbered]
        """The tokens of each as ranks, rarest first."""
        # A token in only one set is shared with no other.
        self._first_shared = sum(times == 1 for times in frequency.values())
        self._bits = [1 << rank % _SIGNATURE_BITS for rank in range(len(order))]
        draw = Random(0)
        self._codes = [draw.getrandbits(60) for _ in order]
        """The XOR of its tokens' codes represents a part; chance collisions are verified like all candidates."""
        self._own = [self._part_keys(each, self._parts(len(each))) for each in self._sets]
        """The keys of each under its own number of parts."""
        self._crowded = {key for key, times in Counter(chain.from_iterable(self._own)).items() if times > _CROWD}
        self._index: dict[int, _Entry | list[_Entry]] = {}
        """Key → the kept items with that key. Most keys have one: it needs no list, and there are many keys."""

    def add(self, place: int) -> bool:
        """Whether this set is kept."""
        ranks = self._sets[place]
        size, mine = len(ranks), frozenset(ranks)
        signature = reduce(or_, map(self._bits.__getitem__, ranks))
        entries: list[int] = []
        needs_prefix = own_prefix = False
        # Keys under which near sets may be found, including its own.
        for parts in self._parts_near(size):
            keys = self._own[place] if parts == self._parts(size) else self._part_keys(ranks, parts)
            rare = [key for key in keys if key not in self._crowded]
            if self._has_near(mine, signature, rare):
                return False
            is_crowded = not keys or len(rare) < len(keys)
            needs_prefix |= is_crowded
            if parts == self._parts(size):
                entries, own_prefix = rare, is_crowded
        for depth in self._depths_near(size) if needs_prefix else ():
            prefixes = self._prefix_keys(ranks, depth)
            if self._has_near(mine, signature, prefixes):
                return False
            if own_prefix and depth == self._depth(size):
                entries += prefixes
        entry, index = (signature, ranks), self._index
        for key in entries:
            others = index.get(key)
            if others is None:
                index[key] = entry
            elif isinstance(others, list):
                others.append(entry)
            else:
                index[key] = [others, entry]
        return True

    def _has_near(self, mine: frozenset[int], signature: int, keys: list[int]) -> bool:
        # A set may have several keys; comparing signatures again is cheaper than remembering which were seen.
        most, entries_of = self._most_unshared(len(mine)), self._index.get
        for key in keys:
            entries = entries_of(key)
            if entries is None:
                continue
            for other, ranks in entries if isinstance(entries, list) else (entries,):
                if (signature ^ other).bit_count() <= most and self._is_near(mine, ranks):
                    return True
        return False

    def _is_near(self, mine: frozenset[int], other: tuple[int, ...]) -> bool:
        shared = len(mine.intersection(other))
        return shared >= self._threshold * (len(mine) + len(other) - shared) - _SLACK

    def _prefix_keys(self, ranks: tuple[int, ...], depth: int) -> list[int]:
        prefix = ranks[: len(ranks) - self._least_shared(len(ranks)) + depth]
        return list(map(hash, combinations([rank for rank in prefix if rank >= self._first_shared], depth)))

    def _part_keys(self, ranks: tuple[int, ...], parts: int) -> tuple[int, ...]:
        """One key for each part; empty if there are no parts."""
        if not parts:
            return ()
        codes = [0] * parts
        for rank in ranks:
            codes[rank % parts] ^= self._codes[rank]
        return tuple([hash((parts, part, code)) for part, code in enumerate(codes)])

    def _least_shared(self, size: int) -> int:
        return ceil(self._threshold * size - _SLACK)

    def _most_unshared(self, size: int) -> int:
        """Most tokens in only one of two near sets, given the size of one."""
        return int((1 - self._threshold) / self._threshold * size + _SLACK)

    def _sizes_near(self, size: int) -> range:
        return range(self._least_shared(size), int(size / self._threshold + _SLACK) + 1)

    def _find_parts(self, size: int) -> int:
        """Number of parts; 0 if the threshold is too low for parts."""
        parts = self._most_unshared(size) + 1
        return parts if size >= _LEAST_PART * parts else 0

    def _find_depth(self, size: int) -> int:
        least = self._least_shared(size)
        depth = 1
        while depth < least and comb(size - least + depth + 1, depth + 1) <= _MOST_KEYS:
            depth += 1
        return depth
