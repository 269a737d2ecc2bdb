"""A server's answer to which tokens it finds likeliest, as arrays: made of lists, and checked.

Belongs here: what such an answer must be, whichever kind of server gave it. Does not belong here: asking for it
(`sglang_api`, `vllm_api`, `served_teacher`).

Legend: `R` tokens of a sequence that train, `K` likeliest tokens in the place of each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np

from orbit_runtime.errors import GateError
from orbit_runtime.rollout.news import LEAST_LOGPROB
from orbit_runtime.types import FLOATS, TOKENS, TopTokens

MOST_LOGPROB, MOST_MASS = 1e-3, 1.0 + 1e-3
"""What rounding may make of a log-prob of 0, and of probabilities that add up to 1."""
MISSING = (float("nan"), -1)
"""Stands for a token that a server did not name."""


@dataclass(frozen=True, slots=True)
class Likeliest:
    """As a server told it, the likeliest first; not checked."""

    logprobs_RK: np.ndarray
    ids_RK: np.ndarray
    """Numbers, which may be no ids."""

    def at(self, rows: Sequence[int]) -> Likeliest:
        return Likeliest(self.logprobs_RK[rows], self.ids_RK[rows])


def from_rows(rows_R: Sequence[Sequence[Sequence[Any]]], count: int) -> Likeliest:
    """
    Args:
        rows_R: log-prob and id of tokens; what is more than `count` of them is left out.

    Raises:
        GateError: these are no numbers.
    """

    def column(index: int) -> np.ndarray:
        told = (
            chain((pair[index] for pair in row[:count]), repeat(MISSING[index], count - len(row))) for row in rows_R
        )
        return np.fromiter(chain.from_iterable(told), np.float64, len(rows_R) * count).reshape(len(rows_R), count)

    try:
        return Likeliest(column(0), column(1))
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise GateError(f"the likeliest tokens are not log-probs and ids: {error}", where="rollout") from None


def check_likeliest(
    told: Likeliest, token_ids_T: Sequence[int], places_R: Sequence[int], *, vocabulary: int, where: str
) -> TopTokens:
    """
    Args:
        places_R: each row's token, by its index in the sequence.
        vocabulary: ids are smaller.
        where: the manifest names the servers.

    Raises:
        GateError: (84) a row is not the beginning of a distribution over the vocabulary.
    """
    for problem, wrong_RK, fix in _problems(told.ids_RK, told.logprobs_RK, vocabulary):
        if wrong_RK.any():
            row, index = (int(each[0]) for each in wrong_RK.nonzero())
            place, named, logprob = places_R[row], told.ids_RK[row, index], told.logprobs_RK[row, index]
            raise GateError(
                f"number {index + 1} of the teacher's {wrong_RK.shape[1]} likeliest tokens in the place of token "
                f"{place} of an answer, after {list(token_ids_T[max(0, place - 4) : place])}, is {named:.10g} with the "
                f"log-prob {logprob:g}: {problem}",
                where=where,
                fix=fix,
            )
    ids, logprobs = told.ids_RK.astype(np.int32), told.logprobs_RK.astype(np.float32)
    return array(TOKENS, ids.tobytes()), array(FLOATS, logprobs.tobytes())


def _problems(ids_RK: np.ndarray, logprobs_RK: np.ndarray, vocabulary: int) -> Iterator[tuple[str, np.ndarray, str]]:
    """What may be wrong, with the entries of which it is true, and what to do."""
    count = ids_RK.shape[1]
    yield (
        "the server named fewer",
        (ids_RK == MISSING[1]) & np.isnan(logprobs_RK),
        f"start vLLM with --max-logprobs {count} or more, or lower algorithm.teacher.topK",
    )
    other_model = "take a teacher whose servers tell log-probs of the model's own distribution"
    no_logprob = ~((logprobs_RK > LEAST_LOGPROB) & (logprobs_RK <= MOST_LOGPROB))
    yield "that is no log-prob of a token that can follow", no_logprob, other_model
    no_id = ~((ids_RK >= 0) & (ids_RK < vocabulary) & (ids_RK == np.floor(ids_RK)))
    yield (
        f"the policy's vocabulary has the ids 0 to {vocabulary - 1}",
        no_id,
        "take a teacher with the policy's tokenizer and vocabulary",
    )
    order = "look at the server, or take another: it does not answer as SGLang and vLLM do"
    yield "it is likelier than the one before it", np.diff(logprobs_RK, axis=1, prepend=np.inf) > 0, order
    by_id = ids_RK.argsort(axis=1, kind="stable")
    again = np.zeros_like(no_id)
    ordered = np.take_along_axis(ids_RK, by_id, axis=1)
    np.put_along_axis(again, by_id, np.diff(ordered, axis=1, prepend=-1) == 0, axis=1)
    yield "it was named before", again, order
    too_much = np.exp(logprobs_RK, dtype=np.float64).cumsum(axis=1) > MOST_MASS
    yield "the probabilities up to it add up to more than 1", too_much, other_model
