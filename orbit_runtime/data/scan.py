"""Scans a source's rows once: their places, the types of their columns, which rows are broken.

Belongs here: the rules for a row. Does not belong here: file formats (`readers`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from orbit_runtime.data.stores import BLOCK, OFFSETS, SIZES
from orbit_runtime.errors import DataError

MAX_ROW = 1 << 27
"""Most bytes of one row: a longer row means that the file is not JSON lines, or is damaged."""
MAX_COLUMNS = 4096
"""Most columns that are distinguished; a file with more has rows whose keys are data."""
MAX_LISTED = 5
"""Most broken rows named in one message."""


class Columns:
    """The types in each column of a source: the number of rows, and the first of them."""

    def __init__(self) -> None:
        self.rows = 0
        self.kinds: dict[str, dict[str, list[int]]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        number = self.rows
        self.rows += 1
        for name, value in row.items():
            kinds = self.kinds.get(name)
            if kinds is None:
                if len(self.kinds) >= MAX_COLUMNS:
                    continue
                kinds = self.kinds[name] = {}
            kind = kind_of(value)
            if kind in kinds:
                kinds[kind][0] += 1
            else:
                kinds[kind] = [1, number]


class Scan:
    """The index of a file as it grows, row by row."""

    def __init__(self, prompt_field: str | None, columns: Columns, counted: int | None) -> None:
        """
        Args:
            prompt_field: column of the prompt; None if a row needs no prompt.
            columns: columns of the source, which may have several files.
            counted: number of rows that are used, and whose columns therefore matter; None for all.
        """
        self.offsets, self.lines, self.longest = array(OFFSETS), array(OFFSETS), array(SIZES)
        self.count = 0
        self.problems: list[str] = []
        self.num_problems = 0
        self._num_without_prompt = 0
        self._fix: str | None = None
        self._prompt_field, self._columns, self._counted = prompt_field, columns, counted

    @property
    def reads_prompts(self) -> bool:
        """Whether a run uses the rows directly; otherwise they are prepared first, which reports unusable rows."""
        return self._prompt_field is not None

    def add(self, row: Any, size: int, *, at: str, line: int = 0, offset: int = 0) -> None:
        """Args: at: the row's place, for the user; size: its bytes as JSON."""
        problem = row_problem(row, self._prompt_field) if self._prompt_field is not None else _object_problem(row)
        if problem is None and size > MAX_ROW:
            problem = f"longer than {MAX_ROW >> 20} MiB"
        if problem:
            self._num_without_prompt += self.reads_prompts and isinstance(row, dict) and self._prompt_field not in row
            self.refuse(f"{at}: {problem}")
            return
        if self.count % BLOCK == 0:
            self.offsets.append(offset)
            self.lines.append(line)
            self.longest.append(size)
        elif size > self.longest[-1]:
            self.longest[-1] = size
        self.count += 1
        if self._counted is None or self._columns.rows < self._counted:
            self._columns.add(row)

    def refuse(self, problem: str, fix: str | None = None) -> None:
        """Records a broken row: the first few in full, the rest as a count.

        Args:
            fix: what to do about this kind of problem; only the first one given is used.
        """
        self.num_problems += 1
        self._fix = self._fix or fix
        if len(self.problems) < MAX_LISTED:
            self.problems.append(problem)

    def check(self, where: str, fix: str = "one JSON object a line, each with the prompt's key") -> None:
        """
        Raises:
            DataError: there are broken rows, or no rows at all.
        """
        if self.num_problems:
            count = "1 broken row" if self.num_problems == 1 else f"{self.num_problems} broken rows"
            if self._num_without_prompt == self.num_problems:
                fix = "name the column that holds the prompt: `promptField`, beside the `uri` of this file"
            raise DataError(f"{count}:\n{listed(self.problems, self.num_problems)}", where=where, fix=self._fix or fix)
        if not self.count:
            raise DataError("the prompts file has no rows", where=where, fix="give it at least one row with a prompt")


def _object_problem(row: Any) -> str | None:
    return None if isinstance(row, dict) else f"a row is a JSON object, this is {kind_of(row)}"


def row_problem(row: Any, prompt_field: str) -> str | None:
    """Why this row is not a prompt, or `None`."""
    if not isinstance(row, dict):
        return _object_problem(row)
    if prompt_field not in row:
        return f"no key {prompt_field!r}; the row has: {', '.join(map(repr, row)) or 'no keys'}"
    prompt = row[prompt_field]
    if isinstance(prompt, str):
        return None if prompt.strip() else f"{prompt_field!r} is empty"
    if not isinstance(prompt, list):
        return f"{prompt_field!r} is a string or a list of chat messages, this is {kind_of(prompt)}"
    if not prompt:
        return f"{prompt_field!r} is an empty list"
    for index, message in enumerate(prompt):
        if not isinstance(message, dict):
            return f"{prompt_field}[{index}] is a message with 'role' and 'content', this is {kind_of(message)}"
        where = f"{prompt_field}[{index}]"
        if not isinstance(message.get("role"), str):
            return f"{where}.role is a string, this is {kind_of(message.get('role'))}"
        problem = _content_problem(message, where)
        if problem:
            return problem
    return None


def _content_problem(message: Mapping[str, Any], where: str) -> str | None:
    """Whether the content is text, a list of parts, or absent beside tool calls."""
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        return f"{where}.tool_calls is a list of objects, this is {kind_of(calls)}"
    if content is None and calls:
        return None
    if isinstance(content, list):
        for index, part in enumerate(content):
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                return f"{where}.content[{index}] is a part with a 'type', this is {kind_of(part)}"
        return None
    return None if isinstance(content, str) else f"{where}.content is a string, this is {kind_of(content)}"


def as_json(row: Mapping[str, Any]) -> str:
    """
    Raises:
        ValueError: JSON cannot represent a column, which the message names: rewards run in other processes and
        receive columns as JSON.
    """
    try:
        return json.dumps(row, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        for key, value in row.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError):
                held = "NaN or an infinite number" if _is_plain(value) else kind_of(value)
                raise ValueError(
                    f"column {key!r} holds {held}, which JSON cannot hold; drop or convert the column"
                ) from None
        raise


def _is_plain(value: Any) -> bool:
    """Whether only a number prevents representing the value as JSON."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def listed(problems: Sequence[str], count: int | None = None) -> str:
    """The first few, one per line, and how many more of `count` there are."""
    more = (len(problems) if count is None else count) - MAX_LISTED
    return "\n".join(f"  {problem}" for problem in problems[:MAX_LISTED]) + (f"\n  and {more} more" if more > 0 else "")


_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    type(None): "null",
    int: "a number",
    float: "a number",
}


def kind_of(value: Any) -> str:
    return _KINDS.get(type(value)) or f"a {type(value).__name__}"
