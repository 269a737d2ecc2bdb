"""The formats that are read, and which of them a text or a chat template is in."""

from __future__ import annotations

from collections.abc import Sequence

from orbit_runtime.model_info.calls import dsml, glm, harmony, hermes, kimi, qwen_coder
from orbit_runtime.model_info.calls.format import CallFormat

FORMATS = {
    each.name: each for each in (kimi.FORMAT, harmony.FORMAT, dsml.FORMAT, qwen_coder.FORMAT, glm.FORMAT, hermes.FORMAT)
}
"""All formats; those whose `signs` say more come first."""


def format_of(template: str) -> CallFormat | None:
    """The format in which a chat template writes calls; None if it is none of these."""
    return next((each for each in FORMATS.values() if all(sign in template for sign in each.signs)), None)


def openings(own: CallFormat | None) -> tuple[str, ...]:
    """Strings that may begin calls in the texts of a model whose template writes them in `own`."""
    found = [opening for each in FORMATS.values() for opening in each.openings]
    return tuple(dict.fromkeys([*found, *([own.first] if own and own.first else [])]))


def find_calls(text: str, own: CallFormat | None) -> tuple[CallFormat, int] | None:
    """The format of a text's first call, and where the call begins; None if there is no call.

    The text decides. Where the same tag begins calls of several formats, the call itself does, and at last the model's
    own format.
    """
    begins = {name: at for name, each in FORMATS.items() if (at := _begin(text, each, own)) >= 0}
    if not begins:
        return None
    at = min(begins.values())
    candidates = [FORMATS[name] for name, each in begins.items() if each == at]
    return _choose(candidates, text[at:], own), at


def _begin(text: str, of: CallFormat, own: CallFormat | None) -> int:
    if of.first and of is own and text.startswith(of.first):
        return 0
    return min((at for opening in of.openings if (at := text.find(opening)) >= 0), default=-1)


def _choose(candidates: Sequence[CallFormat], part: str, own: CallFormat | None) -> CallFormat:
    if len(candidates) == 1:
        return candidates[0]
    body = next(iter(candidates[0].split(part)), "")
    fitting = [each for each in candidates if each.fits(body)]
    if fitting:
        return own if own in fitting and own is not None else fitting[0]
    return own if own in candidates and own is not None else hermes.FORMAT
