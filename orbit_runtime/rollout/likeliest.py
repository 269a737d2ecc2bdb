"""A server's answer to which tokens it finds likeliest: checked, and turned into arrays.

Belongs here: what such an answer must be, whichever kind of server gave it. Does not belong here: asking for it
(`sglang_api`, `vllm_api`, `served_teacher`).

Legend: `R` tokens of a sequence that train, `K` likeliest tokens in the place of each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from orbit_runtime.errors import GateError
from orbit_runtime.rollout.sglang_api import LEAST_LOGPROB
from orbit_runtime.types import FLOATS, TOKENS, TopTokens

MOST_LOGPROB, MOST_MASS = 1e-3, 1.0 + 1e-3
"""What rounding may make of a log-prob of 0, and of probabilities that add up to 1."""


def read_likeliest(
    rows_R: Sequence[Sequence[Sequence[Any]]],
    token_ids_T: Sequence[int],
    places_R: Sequence[int],
    *,
    count: int,
    vocabulary: int,
    where: str,
) -> TopTokens:
    """
    Args:
        rows_R: log-prob and id of at least `count` tokens each, the likeliest first.
        places_R: each row's token, by its index in the sequence.
        vocabulary: ids are smaller.
        where: the manifest names the servers.

    Raises:
        GateError: (84) a row is not that.
    """
    short = next((row for row, entry in enumerate(rows_R) if len(entry) < count), None)
    if short is not None:
        place = _place(token_ids_T, places_R[short])
        raise GateError(
            f"the teacher named {len(rows_R[short])} likeliest tokens {place}; {count} were asked for",
            where=where,
            fix=f"start vLLM with --max-logprobs {count} or more, or lower algorithm.teacher.topK",
        )
    try:
        flat = (np.fromiter(_of(rows_R, count, index), np.float64, len(rows_R) * count) for index in (0, 1))
        logprobs_RK, ids_RK = (each.reshape(len(rows_R), count) for each in flat)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise GateError(f"the teacher's likeliest tokens are not log-probs and ids: {error}", where=where) from None
    for problem, wrong_RK, fix in _problems(ids_RK, logprobs_RK, vocabulary):
        if wrong_RK.any():
            row, index = (int(each[0]) for each in wrong_RK.nonzero())
            told = f"{ids_RK[row, index]:g} with the log-prob {logprobs_RK[row, index]:g}"
            raise GateError(
                f"the teacher named as number {index + 1} of its likeliest tokens {told} "
                f"{_place(token_ids_T, places_R[row])}: {problem}",
                where=where,
                fix=fix,
            )
    return array(TOKENS, ids_RK.astype(np.int32).tobytes()), array(FLOATS, logprobs_RK.astype(np.float32).tobytes())


def _of(rows_R: Sequence[Sequence[Sequence[Any]]], count: int, index: int) -> Iterator[Any]:
    return (pair[index] for row in rows_R for pair in row[:count])


def _place(token_ids_T: Sequence[int], place: int) -> str:
    return f"in the place of token {place} of an answer, after {list(token_ids_T[max(0, place - 4) : place])}"


def _problems(ids_RK: np.ndarray, logprobs_RK: np.ndarray, vocabulary: int) -> Iterator[tuple[str, np.ndarray, str]]:
    """What may be wrong, with the entries of which it is true, and what to do."""
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
    yield "it named that token before", again, order
    too_much = np.exp(logprobs_RK).cumsum(axis=1) > MOST_MASS
    yield "the probabilities up to it add up to more than 1", too_much, other_model
