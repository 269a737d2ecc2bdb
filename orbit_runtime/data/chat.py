"""Chat messages to token ids and back, with the tokenizer that lies in the model's folder.

Belongs here: the one place that loads a transformers tokenizer; always from local files, never executing code from
them. Does not belong here: which prompts there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.content import FILES
from orbit_runtime.model_info.settings import load_settings

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class ChatTokenizer:
    """A model's own tokenizer and chat template.

    Raises:
        ModelError: the folder holds no tokenizer, no chat template, or names no end-of-sequence token.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._tokenizer = _load_tokenizer(self._folder)
        self._eos_ids = _resolve_eos_ids(self._folder, self._tokenizer)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion: those of generation_config.json, config.json and the tokenizer, in this
        order."""
        return self._eos_ids

    @property
    def pad_id(self) -> int:
        pad = self._tokenizer.pad_token_id
        return self._eos_ids[0] if pad is None else int(pad)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of the conversation up to where the assistant's answer starts."""
        return self.encode_many([messages])[0]

    def encode_many(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[list[int]]:
        """`encode_chat` of each, in one call to the tokenizer."""
        texts = [self._render(messages) for messages in conversations]
        if not texts:
            return []
        # The template already wrote the special tokens.
        return [list(ids) for ids in self._tokenizer(texts, add_special_tokens=False)["input_ids"]]

    def encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens, with its spaces as they are."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            plain = [dict(message) for message in messages]
            return str(self._tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates are programs of the model's author and raise what they like
            raise ModelError(
                f"the chat template refuses a prompt: {error}",
                where=str(self._folder),
                fix="use the roles that the template knows, in the order it expects",
            ) from error


def _load_tokenizer(folder: Path) -> Any:
    if not folder.is_dir():
        raise ModelError("the model folder does not exist", where=str(folder), fix="correct spec.model.uri")
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise ModelError(
            "the model folder holds no tokenizer",
            where=str(folder),
            fix=f"copy the tokenizer files of the model into it ({TOKENIZER_FILES[0]}, tokenizer_config.json)",
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises anything from OSError to KeyError here
        _check_settings(folder)
        raise ModelError(
            f"the tokenizer cannot be loaded: {_summary(error)}",
            where=str(folder),
            fix="copy or download the tokenizer files and config.json of the model again",
        ) from error
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template",
            where=str(folder),
            fix="add chat_template.jinja, or a chat_template to tokenizer_config.json",
        )
    return tokenizer


def _check_settings(folder: Path) -> None:
    """The library reads config.json as well, and blames the tokenizer for whatever file is broken."""
    for name in FILES:
        if name.endswith(".json") and (folder / name).is_file():
            load_settings(folder / name)
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise ModelError(
            f"transformers cannot read this configuration: {_summary(error)}",
            where=str(folder / "config.json"),
            fix="correct that value, or copy or download the file again",
        ) from error


def _summary(error: Exception) -> str:
    """The first two lines: the library names a field in one and what is wrong with it in the next."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def _resolve_eos_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = load_settings(path).get("eos_token_id") if path.is_file() else None
        found += [value] if isinstance(value, int) else list(value or ())
    if tokenizer.eos_token_id is not None:
        found.append(int(tokenizer.eos_token_id))
    if not found:
        raise ModelError(
            "neither generation_config.json, config.json nor the tokenizer names an end-of-sequence token",
            where=str(folder),
            fix="set eos_token_id in generation_config.json",
        )
    return tuple(_unique(found))


def _unique(values: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(values))
