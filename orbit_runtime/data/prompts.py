"""Prompts in a reproducible order, with a cursor that a checkpoint keeps.

Belongs here: concatenating sources, `limit`, `epochs`, shuffling, resuming. Does not belong here: file formats
(`rows`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orbit_runtime.data.rows import PromptSource, listed, load_rows
from orbit_runtime.errors import DataError
from orbit_runtime.seeds import stream_key
from orbit_runtime.types import Prompt


@dataclass(frozen=True, slots=True)
class PromptTable:
    """Every prompt of a run in file order, visit 0, and what identifies the data."""

    prompts_P: tuple[Prompt, ...]
    digest: str
    """`sha256:<hex>` over the sources' bytes, prompt fields and the limit: equal digests mean equal prompts."""
    file_digests: tuple[str, ...]
    """`sha256:<hex>` of each source's bytes."""
    rows: tuple[int, ...] = ()
    """How many each source has, those beyond the limit among them."""


def load_prompts(sources: Sequence[PromptSource], *, limit: int | None = None) -> PromptTable:
    """Reads and checks every source; `limit` keeps the first n rows of all of them together.

    Ids are the file's stem and the row's number from 0, such as `two-digit-addition/17`; a stem that repeats gets
    `-2`, `-3`.
    """
    prompts: list[Prompt] = []
    digest = hashlib.sha256()
    files: list[str] = []
    counts: list[int] = []
    seen: dict[str, int] = {}
    for source in sources:
        rows, file_digest = load_rows(source)
        files.append(f"sha256:{file_digest}")
        counts.append(len(rows))
        digest.update(f"{file_digest} {source.prompt_field}\n".encode())
        seen[source.name] = seen.get(source.name, 0) + 1
        name = source.name if seen[source.name] == 1 else f"{source.name}-{seen[source.name]}"
        prompts += [_build_prompt(f"{name}/{index}", row, source.prompt_field) for index, row in enumerate(rows)]
    if limit is not None:
        digest.update(f"limit {limit}\n".encode())
        prompts = prompts[:limit]
    if not prompts:
        raise DataError(
            "there are no prompts",
            where="spec.data.prompts",
            fix="name at least one file; spec.data.limit is 1 or more",
        )
    return PromptTable(tuple(prompts), f"sha256:{digest.hexdigest()}", tuple(files), tuple(counts))


def hold_out(table: PromptTable, share: float, seed: int) -> tuple[PromptTable, tuple[Prompt, ...]]:
    """What is left of a table, and the share of its rows that is held out: at least one, none of a share of 0.

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
    left = tuple(prompt for index, prompt in enumerate(table.prompts_P) if index not in chosen)
    return replace(table, prompts_P=left), tuple(table.prompts_P[index] for index in held)


def check_fields(table: PromptTable, required: Mapping[str, str]) -> None:
    """Every prompt has the keys that rewards will read; `required` maps a key to the reward that reads it."""
    for field, reader in required.items():
        for prompt in table.prompts_P:
            if field not in prompt.fields:
                raise DataError(
                    f"no key {field!r}, which reward {reader!r} reads; the row has: "
                    f"{', '.join(map(repr, prompt.fields)) or 'no keys besides the prompt'}",
                    where=prompt.prompt_id,
                    fix="add the key to every row, or name another one in the reward's arguments",
                )


def check_lengths(
    table: PromptTable,
    encode_many: Callable[[Sequence[Sequence[Mapping[str, Any]]]], list[list[int]]],
    *,
    max_prompt_tokens: int,
) -> None:
    """No prompt is longer than what the model's context leaves beside the completion."""
    encoded = encode_many([prompt.messages for prompt in table.prompts_P])
    long = [
        (p.prompt_id, len(ids)) for p, ids in zip(table.prompts_P, encoded, strict=True) if len(ids) > max_prompt_tokens
    ]
    if not long:
        return
    lines = [f"{prompt_id}: {length} tokens" for prompt_id, length in long]
    raise DataError(
        f"prompts longer than {max_prompt_tokens} tokens:\n{listed(lines)}",
        where="spec.data.prompts",
        fix="shorten or drop them, raise spec.model.maxSequenceLength, or lower spec.rollout.sampling.maxNewTokens",
    )


class PromptStream:
    """Draws prompts epoch after epoch. The order is a function of (seed, epoch); the cursor is two integers.

    `epochs=None` never ends. Otherwise `take` returns fewer than asked at the end, and then nothing: the caller stops.
    """

    def __init__(self, table: PromptTable, *, seed: int, shuffle: bool = True, epochs: int | None = None) -> None:
        self._table = table
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._epoch = 0
        self._position = 0
        self._order = self._build_order()

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts. One draw may cross an epoch's end, so a prompt can appear twice with different visits."""
        taken: list[Prompt] = []
        while len(taken) < n and not self.is_exhausted:
            chunk = self._order[self._position : self._position + n - len(taken)]
            taken += [self._visit(index) for index in chunk]
            self._position += len(chunk)
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._build_order()
        return taken

    @property
    def is_exhausted(self) -> bool:
        return self._epochs is not None and self._epoch >= self._epochs

    def state(self) -> dict[str, Any]:
        """The cursor, as JSON."""
        return {"epoch": self._epoch, "position": self._position, "digest": self._table.digest}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues after the prompts that were taken when `state` was saved.

        Raises:
            DataError: the prompts are not those of the saved cursor.
        """
        if state["digest"] != self._table.digest:
            raise DataError(
                f"the prompts changed since the checkpoint: {state['digest']} then, {self._table.digest} now",
                where="spec.data.prompts",
                fix="restore the files, or start a new run",
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._build_order()

    def _visit(self, index: int) -> Prompt:
        prompt = self._table.prompts_P[index]
        return Prompt(prompt.prompt_id, self._epoch, prompt.messages, prompt.fields)

    def _build_order(self) -> Sequence[int]:
        count = len(self._table.prompts_P)
        if self.is_exhausted or not self._shuffle:
            return range(count)
        return shuffled(count, stream_key(self._seed, "shuffle", self._epoch))


def shuffled(count: int, key: int) -> list[int]:
    """A permutation of `range(count)` that depends on (count, key) only: indexes sorted by their keyed hash."""
    key_bytes = key.to_bytes(8, "little")

    def rank(index: int) -> bytes:
        return hashlib.blake2b(index.to_bytes(8, "little"), key=key_bytes, digest_size=8).digest()

    return sorted(range(count), key=rank)


def _build_prompt(prompt_id: str, row: Mapping[str, Any], prompt_field: str) -> Prompt:
    prompt = row[prompt_field]
    messages: Iterable[Mapping[str, Any]] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    fields = {key: value for key, value in row.items() if key != prompt_field}
    return Prompt(prompt_id, 0, tuple(dict(message) for message in messages), fields)
