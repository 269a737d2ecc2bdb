"""End tokens and text of a completion, the same for every engine.

Belongs here: what is cut off a text. Does not belong here: tokens, which are never changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from orbit_runtime.types import Sampling, Tokenizer


def end_ids(sampling: Sampling, eos_ids: Sequence[int]) -> tuple[int, ...]:
    """Tokens that end a completion, given the model's own end tokens."""
    own = () if sampling.ignore_eos else tuple(eos_ids)
    return (*own, *sampling.stop_token_ids)


def answer_text(tokenizer: Tokenizer, tokens: Sequence[int], sampling: Sampling) -> str:
    """Decoded text, without the token that ended it and cut at the first stop string."""
    kept = tokens[:-1] if tokens and tokens[-1] in end_ids(sampling, tokenizer.eos_ids) else tokens
    text = tokenizer.decode(kept)
    cuts = [at for at in (text.find(stop) for stop in sampling.stop) if at >= 0]
    return text[: min(cuts)] if cuts else text
