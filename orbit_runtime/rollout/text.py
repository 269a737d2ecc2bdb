"""A completion's text from its tokens, the same for every engine.

Belongs here: what is cut off a text. Does not belong here: tokens, which are never changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from orbit_runtime.types import Tokenizer


def answer_text(tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str]) -> str:
    """Decoded, without the end-of-sequence token and from the first stop string on."""
    kept = tokens[:-1] if tokens and tokens[-1] in tokenizer.eos_ids else tokens
    text = tokenizer.decode(kept)
    cuts = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(cuts)] if cuts else text
