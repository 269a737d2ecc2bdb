"""The prompts of a run: rows of several sources in one numbering, and the checks on them before the run starts.

Belongs here: concatenating sources, `limit`, holding out, columns, lengths. Does not belong here: file formats
(`rows`), drawing (`stream`).
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, overload

from orbit_runtime.data.chat import blamed
from orbit_runtime.data.permutation import shuffled
from orbit_runtime.data.rows import OpenedSource, PromptSource, open_rows
from orbit_runtime.data.scan import MAX_LISTED, listed
from orbit_runtime.data.stores import OFFSETS
from orbit_runtime.errors import DataError, ModelError
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Prompt

ALL_ENCODED = 32_768
"""Number of prompts whose tokens are all counted before a run starts, which takes some seconds."""
ENCODED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class NamedRows:
    """A source and the first part of its prompts' ids."""

    name: str
    source: PromptSource
    opened: OpenedSource

    def build_prompt(self, number: int) -> Prompt:
        return _build_prompt(f"{self.name}/{number}", self.opened.store.read(number), self.source.prompt_field)

    def place(self, number: int) -> str:
        """The place of a row, for the user."""
        return f"{self.source.uri}, {self.opened.store.place(number)}"


class PromptRows(Sequence[Prompt]):
    """The prompts of several sources by number, each read on access; none is kept in memory."""

    def __init__(self, sources: Sequence[NamedRows], chosen: Sequence[int] | None = None) -> None:
        """Args: chosen: numbers of the selected prompts; None for all."""
        self.sources = tuple(sources)
        self._ends = list(accumulate(len(each.opened.store) for each in sources))
        self.chosen: Sequence[int] = range(self._ends[-1] if self._ends else 0) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> PromptRows: ...
    def __getitem__(self, index: int | slice) -> Prompt | PromptRows:
        if isinstance(index, slice):
            return PromptRows(self.sources, self.chosen[index])
        source, number = self.find(index)
        return self.sources[source].build_prompt(number)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))

    def select(self, indexes: Iterable[int]) -> PromptRows:
        """The table of these numbers, in this order."""
        return PromptRows(self.sources, array(OFFSETS, (self.chosen[index] for index in indexes)))

    def spans(self) -> list[range]:
        """The span of each source's prompts, which are in the order of their sources."""
        ends = [bisect_left(self.chosen, end) for end in self._ends]
        return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def number_of(self, prompt_id: str) -> int:
        """Number of a prompt among all rows, regardless of `limit` and of rows held out."""
        name, _, number = prompt_id.rpartition("/")
        source = next(place for place, each in enumerate(self.sources) if each.name == name)
        return (self._ends[source - 1] if source else 0) + int(number)

    def find(self, index: int) -> tuple[int, int]:
        """Number of the source, and of the row in it."""
        whole = self.chosen[index]
        source = bisect_right(self._ends, whole)
        return source, whole - (self._ends[source - 1] if source else 0)

    def place_of(self, prompt_id: str) -> str:
        """File and line of a prompt, and its id. The file is read up to there: for an error, not for every row."""
        name, _, number = prompt_id.rpartition("/")
        source = next(each for each in self.sources if each.name == name)
        return f"{source.place(int(number))} ({prompt_id})"

    def bound(self, index: int) -> int:
        """Upper bound of the bytes of the prompt's text."""
        source, number = self.find(index)
        return self.sources[source].opened.store.bound(number)

    def place(self, index: int) -> str:
        source, number = self.find(index)
        return self.sources[source].place(number)


@dataclass(frozen=True, slots=True)
class PromptTable:
    """Every prompt of a run in file order, at visit 0, and the digests that identify the data."""

    prompts_P: PromptRows
    digest: str
    """`sha256:<hex>` over the sources' bytes, prompt fields and the limit: equal digests mean equal prompts."""
    file_digests: tuple[str, ...]
    """`sha256:<hex>` of each source's bytes."""
    rows: tuple[int, ...] = ()
    """Rows of each source, including those beyond the limit."""


def load_prompts(sources: Sequence[PromptSource], *, limit: int | None = None) -> PromptTable:
    """Reads and checks every source; `limit` keeps the first n rows of all of them together.

    Ids are the file's stem and the row's number from 0, such as `two-digit-addition/17`; a stem that repeats gets
    `-2`, `-3`.
    """
    read: list[NamedRows] = []
    digest = hashlib.sha256()
    seen: dict[str, int] = {}
    left = limit
    for source in sources:
        opened = open_rows(source, left)
        left = None if left is None else max(0, left - len(opened.store))
        digest.update(f"{opened.digest} {source.prompt_field}\n".encode())
        seen[source.name] = seen.get(source.name, 0) + 1
        name = source.name if seen[source.name] == 1 else f"{source.name}-{seen[source.name]}"
        read.append(NamedRows(name, source, opened))
    if limit is not None:
        digest.update(f"limit {limit}\n".encode())
    prompts = PromptRows(read)[:limit]
    if not prompts:
        raise DataError(
            "there are no prompts",
            where="spec.data.prompts",
            fix="name at least one file; spec.data.limit is 1 or more",
        )
    files = tuple(f"sha256:{each.opened.digest}" for each in read)
    return PromptTable(prompts, f"sha256:{digest.hexdigest()}", files, tuple(len(each.opened.store) for each in read))


def hold_out(table: PromptTable, share: float, seed: int) -> tuple[PromptTable, tuple[Prompt, ...]]:
    """Splits a table into the rows that remain and those held out: at least one, or none for a share of 0.

    Raises:
        DataError: nothing would be left.
    """
    if share == 0:
        return table, ()
    count = len(table.prompts_P)
    held = sorted(shuffled(count, stream_key(seed, "hold out"))[: max(1, round(share * count))])
    if len(held) == count:
        raise DataError(
            f"holding out {len(held)} of {count} rows leaves none to train on",
            where="spec.data.validation.share",
            fix="give more rows, lower it, or remove `validation`",
        )
    chosen = set(held)
    left = array(OFFSETS, (index for index in range(count) if index not in chosen))
    prompts_P = table.prompts_P
    return replace(table, prompts_P=prompts_P.select(left)), tuple(prompts_P[index] for index in held)


def check_fields(table: PromptTable, required: Mapping[str, str]) -> None:
    """Checks that every prompt has the columns that rewards read, each of one type; `required` maps a column to its
    reward.

    Raises:
        DataError: a row lacks a column, has null, or has another type than earlier rows. The message names the row.
    """
    for each in table.prompts_P.sources:
        columns = each.opened.columns
        for field, reader in required.items():
            kinds = columns.kinds.get(field, {})
            if sum(count for count, _ in kinds.values()) < columns.rows:
                row = next(row for row in range(columns.rows) if field not in each.opened.store.read(row))
                names = each.opened.store.read(row).keys() - {each.source.prompt_field}
                raise DataError(
                    f"no key {field!r}, which reward {reader!r} reads; the row has: "
                    f"{', '.join(map(repr, sorted(names))) or 'no keys besides the prompt'}",
                    where=table.prompts_P.place_of(f"{each.name}/{row}"),
                    fix="add the key to every row, or name another column in the reward: `arguments: {field: COLUMN}`",
                )
            found = sorted((first, kind) for kind, (_, first) in kinds.items() if kind != "null" or len(kinds) == 1)
            if "null" in kinds:
                raise DataError(
                    f"column {field!r}, which reward {reader!r} reads, is null here",
                    where=table.prompts_P.place_of(f"{each.name}/{kinds['null'][1]}"),
                    fix="fill it or drop the row: a reward cannot be given for it",
                )
            if len(found) > 1:
                (first, kind), (second, other) = found[:2]
                raise DataError(
                    f"column {field!r}, which reward {reader!r} reads, holds {other} here, and {kind} in "
                    f"{each.opened.store.place(first)}",
                    where=table.prompts_P.place_of(f"{each.name}/{second}"),
                    fix="write the column in one kind in every row",
                )


def check_lengths(
    table: PromptTable,
    encode_many: Callable[[Sequence[Sequence[Mapping[str, Any]]]], list[list[int]]],
    *,
    max_prompt_tokens: int,
) -> int:
    """Checks that no prompt is longer than the model's context leaves beside the completion. Returns the most tokens
    that one may have.

    The tokens of the first `ALL_ENCODED` prompts are all counted; of the others, only those of prompts that could be
    too long: a token covers at least a byte, and the template adds about as much as for the first prompt.
    """
    prompts_P = table.prompts_P

    def encode(rows: Sequence[Prompt]) -> list[list[int]]:
        return encode_many([row.messages for row in rows])

    added = len(encoded_rows(prompts_P[:1], encode, prompts_P.place_of)[0])
    long: list[tuple[str, int]] = []
    longest = added
    for start in range(0, len(prompts_P), ENCODED_AT_ONCE):
        numbers: Iterable[int] = range(start, min(start + ENCODED_AT_ONCE, len(prompts_P)))
        if start >= ALL_ENCODED:
            bounds = {number: prompts_P.bound(number) + added for number in numbers}
            numbers = [number for number, bound in bounds.items() if bound > max_prompt_tokens]
            longest = max(longest, *(min(bound, max_prompt_tokens) for bound in bounds.values()))
        asked = [prompts_P[number] for number in numbers]
        encoded = encoded_rows(asked, encode, prompts_P.place_of) if asked else []
        longest = max(longest, *map(len, encoded), 0)
        long += [
            (prompt.prompt_id, len(ids))
            for prompt, ids in zip(asked, encoded, strict=True)
            if len(ids) > max_prompt_tokens
        ]
    if not long:
        return longest
    raise DataError(
        f"prompts longer than {max_prompt_tokens} tokens:\n{listed_lengths(long, prompts_P.place_of)}",
        where="spec.data.prompts",
        fix="shorten or drop them, raise spec.model.maxSequenceLength, or lower spec.rollout.sampling.maxNewTokens",
    )


def encoded_rows[E](
    rows: Sequence[Any], encode: Callable[[Sequence[Any]], list[E]], place_of: Callable[[str], str]
) -> list[E]:
    """What `encode` makes of the rows. One that the template or the tokenizer refuses is named by its place.

    Args:
        rows: prompts or demonstrations.
    """
    try:
        return encode(rows)
    except ModelError as error:
        for row in rows:
            try:
                encode([row])
            except ModelError as own:
                raise blamed(own, row.messages, place_of(row.prompt_id)) from None
        raise error from None


def listed_lengths(long: Sequence[tuple[str, int]], place_of: Callable[[str], str]) -> str:
    """Prompts that are too long, for people: the place of each, and its tokens.

    Args:
        long: id and number of tokens of each.
    """
    return listed([f"{place_of(each)}: {length} tokens" for each, length in long[:MAX_LISTED]], len(long))


def _build_prompt(prompt_id: str, row: Mapping[str, Any], prompt_field: str) -> Prompt:
    prompt = row[prompt_field]
    messages: Iterable[Mapping[str, Any]] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    fields = {key: value for key, value in row.items() if key != prompt_field}
    return Prompt(prompt_id, 0, tuple(dict(message) for message in messages), fields)
