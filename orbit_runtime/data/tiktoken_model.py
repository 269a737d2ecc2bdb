"""A tokenizer from the vocabulary in tiktoken's format that Kimi's models are published with.

`tiktoken.model` holds byte strings and their ranks, and says nothing of how a text is cut before they apply, nor of the
tokens after them: both are in the publisher's own code, which is never run. They are the same in all files of Kimi-K2,
K2.5 and K2.6, whose `tokenizer_config.json` names the class `TikTokenTokenizer`.

Belongs here: that format, as the library's fast tokenizer. Does not belong here: chat messages (`chat`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.settings import load_settings

VOCABULARY = "tiktoken.model"
SETTINGS = "tokenizer_config.json"
RESERVED = 256
"""Tokens after the ranks. `added_tokens_decoder` names some of them, the others are `<|reserved_token_…|>`."""
CLASS = "TikTokenTokenizer"
_WORD = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join((
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_WORD}]*[\p{{Ll}}{_WORD}]+{_CONTRACTION}",
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_WORD}]+[\p{{Ll}}{_WORD}]*{_CONTRACTION}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))  # fmt: skip
"""`pat_str` of `tokenization_kimi.py`: what a token never crosses, Han characters apart from other letters."""
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def is_tiktoken(folder: Path) -> bool:
    """Whether the tokenizer is in this format alone; a `tokenizer.json` beside it says more."""
    return (folder / VOCABULARY).is_file() and not (folder / "tokenizer.json").is_file()


def load_tiktoken(folder: Path) -> Any:
    """The library's `PreTrainedTokenizerFast` of a folder of which `is_tiktoken` is true.

    Unlike the publisher's class it does not cut runs of more than 25,000 characters without a space, or with nothing
    else, into several.

    Raises:
        ModelError: another model's rules, which are not known, or damaged files.
    """
    settings = load_settings(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    if settings.get("tokenizer_class") != CLASS:
        raise ModelError(
            f"{VOCABULARY} does not say how texts are cut, and the rules of {settings.get('tokenizer_class')} are not "
            f"known, only those of Kimi's {CLASS}",
            where=str(folder / SETTINGS),
            fix="put a tokenizer.json beside it",
        )
    from transformers import PreTrainedTokenizerFast

    template = folder / "chat_template.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=_build(_read_ranks(folder / VOCABULARY), settings, folder / SETTINGS),
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template"),
        clean_up_tokenization_spaces=False,
        **{role: _content(settings[role]) for role in _ROLES if settings.get(role)},
    )


def save_converted(folder: Path, out: Path) -> Path:
    """Writes the same tokenizer in the library's format, for programs that know no other.

    Raises:
        ModelError: as from `load_tiktoken`.
    """
    load_tiktoken(folder).save_pretrained(str(out))
    return out


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        token, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise _damaged(f"{file}:{number}", "the line is not a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise _damaged(str(file), "its ranks do not count from 0 without a gap")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise _damaged(str(file), f"no rank for the byte {missing[0]}")
    return ranks


def _build(ranks: Mapping[bytes, int], settings: Mapping[str, Any], where: Path) -> Any:
    """The `tokenizers.Tokenizer`: transformers' conversion of tiktoken's ranks, with Kimi's pattern and tokens."""
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):  # type: ignore[misc]
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return dict(ranks)

    tokenizer = Converter(vocab_file=VOCABULARY, pattern=PATTERN).converted()
    named = _named_tokens(settings, len(ranks), where)
    reserved = [
        named.get(place, AddedToken(f"<|reserved_token_{place}|>", normalized=False, special=True))
        for place in range(len(ranks), len(ranks) + RESERVED)
    ]
    tokenizer.add_tokens(reserved)
    for place, token in enumerate(reserved, len(ranks)):
        if tokenizer.token_to_id(token.content) != place:
            raise _damaged(f"{where}: added_tokens_decoder.{place}", f"{token.content!r} is already another token")
    return tokenizer


def _named_tokens(settings: Mapping[str, Any], first: int, where: Path) -> dict[int, Any]:
    from tokenizers import AddedToken

    named = {}
    for key, told in (settings.get("added_tokens_decoder") or {}).items():
        if not key.isdigit() or not first <= int(key) < first + RESERVED:
            raise _damaged(
                f"{where}: added_tokens_decoder.{key}",
                f"with {first} ranks, added tokens are those from {first} to {first + RESERVED - 1}",
            )
        if not isinstance(told, Mapping) or not isinstance(told.get("content"), str):
            raise _damaged(f"{where}: added_tokens_decoder.{key}", "it has no content")
        named[int(key)] = AddedToken(
            told["content"], normalized=False, special=bool(told.get("special", True)),
            lstrip=bool(told.get("lstrip")), rstrip=bool(told.get("rstrip")),
            single_word=bool(told.get("single_word")),
        )  # fmt: skip
    return named


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def _damaged(where: str, what: str) -> ModelError:
    return ModelError(what, where=where, fix="copy or download the model's tokenizer files again")
