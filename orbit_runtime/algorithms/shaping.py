"""Penalties subtracted from a reward before it is compared with others.

Belongs here: penalties on a completion's length, in plain floats. Does not belong here: KL in the reward (`kl_reward`).
"""

from __future__ import annotations


def overlong_penalty(length: int, *, longest: int, buffer_share: float, penalty: float) -> float:
    """Penalty of a completion of `length` tokens, from 0.0 to `penalty` (DAPO, arXiv:2503.14476 eq. 13).

    Zero up to `(1 - buffer_share) * longest` tokens, the full penalty at `longest`, and linear in between.

    Example: `overlong_penalty(95, longest=100, buffer_share=0.2, penalty=1.0) == 0.75`
    """
    buffer = buffer_share * longest
    return penalty * min(1.0, max(0.0, (length - (longest - buffer)) / buffer))
