"""Demonstrations: conversations whose answers are learned, as tokens with a mask over exactly these answers.

Belongs here: the messages of a row, which of them are answers, their tokens, and the check that the chat template
allows learning them. Does not belong here: reading files (`rows`), order and cursor (`prompts`), training.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from orbit_runtime.data.chat import ChatTokenizer, Messages, Tools
from orbit_runtime.data.prompts import PromptTable, encoded_rows, listed_lengths
from orbit_runtime.errors import DataError
from orbit_runtime.spec.data import Prompts
from orbit_runtime.types import FLAGS, TOKENS, Prompt

ENCODED_AT_ONCE = 256
"""Conversations per batch; between batches, progress is reported and a request to stop is honoured."""
SHOWN = 40
"""Characters shown of two texts around the place where they diverge."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One conversation, and the indexes of the messages that are answers to learn."""

    prompt_id: str
    messages: Messages
    answers: tuple[int, ...]
    tools: Tools = ()


@dataclass(frozen=True, slots=True)
class EncodedDemonstration:
    """Tokens up to the end of the last answer."""

    token_ids_T: array[int]
    loss_mask_T: array[int]
    """1 for the tokens of an answer, including the one that ends it."""


def read_demonstrations(table: PromptTable, sources: Sequence[Prompts], *, last_only: bool) -> list[Demonstration]:
    """Reads every row, according to its source's columns.

    Raises:
        DataError: a row has no answer to learn; names its file and line.
    """
    of_row = [source for source, rows in zip(sources, table.rows, strict=True) for _ in range(rows)]
    with _located(table.prompts_P.place_of):
        return [
            read_demonstration(
                prompt, completion_field=source.completion_field, tools_field=source.tools_field, last_only=last_only
            )
            for prompt, source in zip(table.prompts_P, of_row, strict=False)
        ]


@contextmanager
def _located(place_of: Callable[[str], str]) -> Iterator[None]:
    """Replaces a prompt's id by its place in an error about one. Only then: a file is read again for it."""
    try:
        yield
    except DataError as error:
        error.where = error.where and place_of(error.where)
        raise


def read_demonstration(
    prompt: Prompt, *, completion_field: str | None, tools_field: str | None = None, last_only: bool = False
) -> Demonstration:
    """The demonstration in a row as `data.prompts` reads it.

    Args:
        completion_field: column of the answer, text or messages; None if the prompt is a whole conversation, whose
        assistant messages are the answers.
        last_only: learn only the last answer.

    Raises:
        DataError: the row has no answer, or an invalid one; names the prompt's id.
    """
    where = prompt.prompt_id
    messages = list(prompt.messages)
    first = 0
    if completion_field is not None:
        first = len(messages)
        messages += _completion(prompt.fields.get(completion_field), completion_field, where)
    answers = [index for index, each in enumerate(messages) if index >= first and each.get("role") == "assistant"]
    if not answers:
        raise DataError(
            "there is no answer to learn: no message has the role `assistant`",
            where=where,
            fix="end each conversation with an answer, or name its column in spec.data.prompts[].completionField",
        )
    tools = prompt.fields.get(tools_field) if tools_field is not None else None
    if not (tools is None or (isinstance(tools, list) and all(isinstance(each, Mapping) for each in tools))):
        raise DataError(
            f"the column {tools_field!r} does not contain a list of JSON schemas",
            where=where,
            fix="write a list of objects",
        )
    return Demonstration(where, messages, tuple(answers[-1:] if last_only else answers), tuple(tools or ()))


def _completion(value: Any, field: str, where: str) -> list[Mapping[str, Any]]:
    if isinstance(value, str) and value:
        return [{"role": "assistant", "content": value}]
    is_messages = isinstance(value, list) and all(isinstance(each, Mapping) and "role" in each for each in value)
    if is_messages and value:
        return list(value)
    raise DataError(
        f"the column {field!r} holds no answer: it must be text that is not empty, or chat messages",
        where=where,
        fix="correct or drop the row, or name another column in spec.data.prompts[].completionField",
    )


def encode_demonstrations(
    demonstrations: Sequence[Demonstration],
    tokenizer: ChatTokenizer,
    *,
    max_tokens: int,
    place_of: Callable[[str], str],
    tell: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[EncodedDemonstration]:
    """Encodes every demonstration exactly as a rollout would be: the tokens before an answer are those of a prompt, and
    the answer ends with the token that ends an answer.

    This requires the **prefix property** of the template: the tokens of a conversation's beginning are the beginning of
    its tokens, at the start and the end of every learned answer. It is checked for each.

    Args:
        max_tokens: longer ones are refused, not cut.
        place_of: from a prompt's id to where it is written, for errors.
        tell: called with progress: number done, total.

    Raises:
        DataError: a conversation lacks the property, an answer has no end, or conversations are too long.
    """
    encoded: list[EncodedDemonstration] = []
    long: list[tuple[str, int]] = []
    for start in range(0, len(demonstrations), ENCODED_AT_ONCE):
        tell(start, len(demonstrations))
        asked = demonstrations[start : start + ENCODED_AT_ONCE]
        with _located(place_of):
            batch = encoded_rows(asked, partial(_encode, tokenizer=tokenizer), place_of)
        for demonstration, found in batch:
            if len(found.token_ids_T) > max_tokens:
                long.append((demonstration.prompt_id, len(found.token_ids_T)))
            encoded.append(found)
    tell(len(demonstrations), len(demonstrations))
    if long:
        raise DataError(
            f"{len(long)} of {len(demonstrations)} demonstrations are longer than {max_tokens} tokens:\n"
            + listed_lengths(long, place_of),
            where="spec.data.prompts",
            fix="shorten or drop them, or raise spec.model.maxSequenceLength",
        )
    return encoded


def _encode(
    demonstrations: Sequence[Demonstration], tokenizer: ChatTokenizer
) -> list[tuple[Demonstration, EncodedDemonstration]]:
    """The texts before and after every answer of each conversation, tokenised in one call."""
    texts: list[str] = []
    for each in demonstrations:
        for answer in each.answers:
            texts.append(tokenizer.render(each.messages[:answer], tools=each.tools))
            texts.append(tokenizer.render(each.messages[: answer + 1], tools=each.tools, answer=False))
    ids = tokenizer.encode_texts(texts)
    ends = accumulate(2 * len(each.answers) for each in demonstrations)
    found = []
    for each, end in zip(demonstrations, ends, strict=True):
        start = end - 2 * len(each.answers)
        found.append((each, _mask(each, texts[start:end], ids[start:end], tokenizer)))
    return found


def _mask(
    demonstration: Demonstration, texts: Sequence[str], ids: Sequence[Sequence[int]], tokenizer: ChatTokenizer
) -> EncodedDemonstration:
    """Args: texts, ids: up to the start and the end of each answer, in turn; the last is the whole conversation."""
    whole = ids[-1]
    mask_T = array(FLAGS, bytes(len(whole)))
    length = 0
    for place, answer in enumerate(demonstration.answers):
        for number in (2 * place, 2 * place + 1):
            if list(whole[: len(ids[number])]) != list(ids[number]):
                raise _no_prefix(demonstration, answer, (texts[number], texts[-1]), (ids[number], whole), tokenizer)
        before, behind = len(ids[2 * place]), len(ids[2 * place + 1])
        if before == 0:
            raise DataError(
                "no message comes before the answer, so nothing prompts it",
                where=demonstration.prompt_id,
                fix="begin each conversation with a question",
            )
        ended = [at for at in range(before, behind) if whole[at] in tokenizer.eos_ids]
        if not ended and behind == len(whole):
            marker = tokenizer.marker_after(demonstration.messages[answer])
            if marker is not None:
                whole = [*whole, marker]
                mask_T.append(0)
        if not ended and behind < len(whole) and whole[behind] in tokenizer.eos_ids:
            # The next role's marker ends it.
            ended = [behind]
        if not ended:
            raise DataError(
                f"message {answer} ends without one of the model's end tokens "
                f"({', '.join(repr(tokenizer.decode_all([each])) for each in tokenizer.eos_ids)}): from it the policy "
                "would learn never to stop",
                where=demonstration.prompt_id,
                fix="use a chat template that ends an answer with such a token",
            )
        length = ended[-1] + 1
        mask_T[before:length] = array(FLAGS, [1]) * (length - before)
    return EncodedDemonstration(array(TOKENS, whole[:length]), mask_T[:length])


def _no_prefix(
    demonstration: Demonstration,
    answer: int,
    texts: tuple[str, str],
    ids: tuple[Sequence[int], Sequence[int]],
    tokenizer: ChatTokenizer,
) -> DataError:
    part, whole = ids
    at = next((place for place, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(map(len, ids)))
    begun, ended = (repr(tokenizer.decode_all(list(each[at : at + 8]))[:SHOWN]) for each in ids)
    in_text = next(
        (place for place, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(len(texts[0]), len(texts[1]))
    )
    is_text = not texts[1].startswith(texts[0])
    around = texts[0][max(0, in_text - SHOWN) : in_text]
    what = (
        f"the template writes it differently once more messages follow: after {around!r} it writes "
        f"{texts[0][in_text : in_text + SHOWN]!r}, but in the whole conversation "
        f"{texts[1][in_text : in_text + SHOWN]!r}"
        if is_text
        else "the text is the same, but the tokenizer splits it elsewhere"
    )
    return DataError(
        f"the chat template lacks the prefix property at message {answer}: token {at} of the conversation up to there "
        f"begins {begun}, of the whole {ended}; {what}. Training would not see what a rollout sees",
        where=demonstration.prompt_id,
        fix="learn the last answer only (spec.data.chat.answers: Last), cut conversations into one row for each "
        "answer, give the template's argument that keeps earlier answers (spec.data.chat.templateArguments), or use a "
        "template whose text with more messages starts with its text without them",
    )
