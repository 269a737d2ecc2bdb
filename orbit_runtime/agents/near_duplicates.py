"""`deduplicate`: items without those that say nearly the same as an earlier one.

Two texts are near-duplicates when the sets of their trigrams (case and white space folded) have a Jaccard similarity of
`threshold` or more. Nothing is approximated. Candidates come from two filters that no near-duplicate passes by: parts
of the sets of which one must be equal (Arasu et al., Efficient Exact Set-Similarity Joins, 2006), and, for parts that
say little, prefixes of the rarest tokens (Bayardo et al., Scaling Up All Pairs Similarity Search, 2007), long enough to
share several (Wang et al., Can We Beat the Prefix Filtering?, 2012). Every candidate is verified: first by signatures
of some hundred bits, of which each that differs stands for a trigram that only one of the two has, then by the sets.

Belongs here: the join. Does not belong here: what an item's text is (`items`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from itertools import chain, combinations, count
from math import ceil, comb
from random import Random
from typing import Any, NamedTuple

from orbit_runtime.agents.checks import check_items, check_number
from orbit_runtime.agents.items import text_of

_MOST_KEYS = 30
"""Of one prefix in the index: more keys each are rarer, so that fewer candidates are verified, and take more memory."""
_CROWD = 500
"""Sets with one and the same part: beyond that, comparing them all costs more than the keys of a prefix do."""
_LEAST_PART = 2
"""Tokens of a part on average; smaller ones are equal too often."""
_SIGNATURE_BITS = 509
"""Several times an item's trigrams, so that few share a bit; and no more, as comparing costs time by its words."""
_SLACK = 1e-9
"""Against rounding: a similarity that is the threshold exactly counts."""


def deduplicate(data: Iterable[Any], threshold: float = 0.9) -> list[Any]:
    """Keeps an item unless one that was kept before it is a near-duplicate; the order stays.

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
    """Of a normalised text between two line breaks, which it cannot hold itself."""
    padded = f"\n{text}\n"
    return frozenset(padded[start : start + 3] for start in range(max(1, len(padded) - 2)))


class _Scheme(NamedTuple):
    """How keys are made of a set. It follows from the set's size."""

    parts: int
    """0: none, the threshold is too low for them."""
    depth: int
    """Tokens of the prefix that make one key together."""


class _Kept:
    """Sets of tokens of which no two are near-duplicates.

    Two near-duplicates differ in at most `parts - 1` tokens: when all tokens there are, are dealt to as many parts, the
    two sets are equal in one. Where that part is a crowd's, such as one of a template's own words, the prefix stands
    for it. Of a set of n tokens of which at least o must be shared, the n - o + depth rarest hold `depth` shared ones.
    """

    def __init__(self, sets: Iterable[frozenset[str]], threshold: float) -> None:
        self._threshold = threshold
        self._scheme = cache(self._find_scheme)
        self._schemes = cache(self._find_schemes)
        numbers: defaultdict[str, int] = defaultdict(count().__next__)
        numbered = [[numbers[token] for token in each] for each in sets]
        frequency = Counter(chain.from_iterable(numbered))
        order = sorted(frequency, key=lambda number: (frequency[number], number))
        ranks = {number: rank for rank, number in enumerate(order)}
        self._sets = [sorted([ranks[number] for number in each]) for each in numbered]
        """The tokens of each as ranks, rarest first."""
        # A token of one set only is shared with none.
        self._first_shared = sum(times == 1 for times in frequency.values())
        self._bits = [1 << rank % _SIGNATURE_BITS for rank in range(len(order))]
        draw = Random(0)
        self._codes = [draw.getrandbits(60) for _ in order]
        """The exclusive or of its tokens' stands for a part; what is equal by chance is verified as all is."""
        own = (self._part_keys(each, self._scheme(len(each)).parts) for each in self._sets)
        self._crowded = {key for key, times in Counter(chain.from_iterable(own)).items() if times > _CROWD}
        self._kept: list[tuple[int, list[int]]] = []
        """Signature and set."""
        self._index: dict[int, list[int]] = {}

    def add(self, place: int) -> bool:
        """Whether this set is kept."""
        ranks = self._sets[place]
        own, mine, signature = self._scheme(len(ranks)), frozenset(ranks), 0
        for rank in ranks:
            signature |= self._bits[rank]
        entries: list[int] = []
        for scheme in self._schemes(len(ranks)):
            keys = self._keys(ranks, scheme)
            if self._has_near(mine, signature, keys):
                return False
            if scheme == own:
                entries = keys
        for key in entries:
            self._index.setdefault(key, []).append(len(self._kept))
        self._kept.append((signature, ranks))
        return True

    def _has_near(self, mine: frozenset[int], signature: int, keys: list[int]) -> bool:
        # A set may stand under several keys; to compare signatures again is cheaper than to remember who was seen.
        most = self._most_unshared(len(mine))
        for key in keys:
            for each in self._index.get(key, ()):
                other, ranks = self._kept[each]
                if (signature ^ other).bit_count() <= most and self._is_near(mine, ranks):
                    return True
        return False

    def _is_near(self, mine: frozenset[int], other: list[int]) -> bool:
        shared = len(mine.intersection(other))
        return shared >= self._threshold * (len(mine) + len(other) - shared) - _SLACK

    def _keys(self, ranks: list[int], scheme: _Scheme) -> list[int]:
        parts = self._part_keys(ranks, scheme.parts)
        keys = [key for key in parts if key not in self._crowded]
        if not parts or len(keys) < len(parts):
            prefix = ranks[: len(ranks) - self._least_shared(len(ranks)) + scheme.depth]
            shared = [rank for rank in prefix if rank >= self._first_shared]
            keys += map(hash, combinations(shared, scheme.depth))
        return keys

    def _part_keys(self, ranks: list[int], parts: int) -> list[int]:
        """None where there are no parts."""
        if not parts:
            return []
        codes = [0] * parts
        for rank in ranks:
            codes[rank % parts] ^= self._codes[rank]
        return [hash((parts, part, code)) for part, code in enumerate(codes)]

    def _least_shared(self, size: int) -> int:
        return ceil(self._threshold * size - _SLACK)

    def _most_unshared(self, size: int) -> int:
        """Tokens that only one of two sets has, at most, where one is of this size and they are near."""
        return int((1 - self._threshold) / self._threshold * size + _SLACK)

    def _find_scheme(self, size: int) -> _Scheme:
        parts = self._most_unshared(size) + 1
        least = self._least_shared(size)
        depth = 1
        while depth < least and comb(size - least + depth + 1, depth + 1) <= _MOST_KEYS:
            depth += 1
        return _Scheme(parts if size >= _LEAST_PART * parts else 0, depth)

    def _find_schemes(self, size: int) -> list[_Scheme]:
        """Those of sets that may be near to one of this size."""
        largest = int(size / self._threshold + _SLACK)
        return sorted({self._scheme(each) for each in range(self._least_shared(size), largest + 1)})
