"""`deduplicate`: items without those that say nearly the same as an earlier one.

Two texts are near-duplicates when the sets of their trigrams (case and white space folded) have a Jaccard similarity of
`threshold` or more. Nothing is approximated: the search is a prefix-filtered join (Bayardo et al., Scaling Up All Pairs
Similarity Search, 2007) with prefixes long enough to share several tokens (Wang et al., Can We Beat the Prefix
Filtering?, 2012), and every candidate is verified: first by signatures of some hundred bits, of which each that differs
stands for a trigram that only one of the two has, then by the sets.

Belongs here: the join. Does not belong here: what an item's text is (`items`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import combinations
from math import ceil, comb
from typing import Any

from orbit_runtime.agents.checks import check_items, check_number
from orbit_runtime.agents.items import text_of

_MOST_KEYS = 30
"""Of one item in the index: more keys each are rarer, so that fewer candidates are verified, and take more memory."""
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
    kept = _Kept([trigrams(texts[index]) for index in distinct], threshold)
    return [items[index] for place, index in enumerate(distinct) if kept.add(place)]


def normal(text: str) -> str:
    return " ".join(text.casefold().split())


def trigrams(text: str) -> frozenset[str]:
    """Of a normalised text between two line breaks, which it cannot hold itself."""
    padded = f"\n{text}\n"
    return frozenset(padded[start : start + 3] for start in range(max(1, len(padded) - 2)))


class _Kept:
    """Sets of tokens of which no two are near-duplicates.

    The rarest tokens of two near-duplicates overlap. `depth` of them are one key of the index: of a set of n tokens, of
    which at least o must be shared, the n - o + depth rarest hold `depth` shared ones.
    """

    def __init__(self, sets: list[frozenset[str]], threshold: float) -> None:
        self._threshold = threshold
        frequency = Counter(token for each in sets for token in each)
        order = sorted(frequency, key=lambda token: (frequency[token], token))
        self._rank = {token: rank for rank, token in enumerate(order)}
        # A token of one set only is shared with none.
        self._first_shared = sum(count == 1 for count in frequency.values())
        self._sets = sets
        self._bits = [1 << rank % _SIGNATURE_BITS for rank in range(len(order))]
        self._kept: list[frozenset[int]] = []
        self._signatures: list[int] = []
        self._index: dict[int, list[int]] = {}
        self._depth = cache(self._find_depth)
        self._depths = cache(self._find_depths)

    def add(self, place: int) -> bool:
        """Whether this set is kept."""
        ranks = sorted([self._rank[token] for token in self._sets[place]])
        mine, size, signature = frozenset(ranks), len(ranks), 0
        for rank in ranks:
            signature |= self._bits[rank]
        entries: list[int] = []
        for depth in self._depths(size):
            keys = self._keys(ranks, depth)
            if self._has_near(mine, signature, keys):
                return False
            if depth == self._depth(size):
                entries = keys
        for key in entries:
            self._index.setdefault(key, []).append(len(self._kept))
        self._kept.append(mine)
        self._signatures.append(signature)
        return True

    def _has_near(self, mine: frozenset[int], signature: int, keys: list[int]) -> bool:
        # A set may stand under several keys; to compare signatures again is cheaper than to remember who was seen.
        most = self._most_unshared(len(mine))
        signatures = self._signatures
        for key in keys:
            for each in self._index.get(key, ()):
                if (signature ^ signatures[each]).bit_count() <= most and self._is_near(mine, self._kept[each]):
                    return True
        return False

    def _is_near(self, a: frozenset[int], b: frozenset[int]) -> bool:
        if min(len(a), len(b)) < self._threshold * max(len(a), len(b)) - _SLACK:
            return False
        shared = len(a & b)
        return shared >= self._threshold * (len(a) + len(b) - shared) - _SLACK

    def _keys(self, ranks: list[int], depth: int) -> list[int]:
        prefix = ranks[: len(ranks) - self._least_shared(len(ranks)) + depth]
        return list(map(hash, combinations([rank for rank in prefix if rank >= self._first_shared], depth)))

    def _least_shared(self, size: int) -> int:
        return ceil(self._threshold * size - _SLACK)

    def _most_unshared(self, size: int) -> int:
        """Tokens that only one of two sets has, at most, where one is of this size and they are near."""
        return int((1 - self._threshold) / self._threshold * size + _SLACK)

    def _find_depth(self, size: int) -> int:
        least = self._least_shared(size)
        depth = 1
        while depth < least and comb(size - least + depth + 1, depth + 1) <= _MOST_KEYS:
            depth += 1
        return depth

    def _find_depths(self, size: int) -> list[int]:
        """Those under which sets stand that may be near to one of this size."""
        largest = int(size / self._threshold + _SLACK)
        return sorted({self._depth(each) for each in range(self._least_shared(size), largest + 1)})
