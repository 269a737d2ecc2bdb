"""Limits of what is supported: one table of rows, used by `orbit validate`, `orbit plan`, the operator and a run.

    combinations   format x family x adapter x engine x trainer
    manifests      what a manifest says by itself: whole models, three processes
    sampling       which sampling settings each kind of engine supports
    served         adapters and arguments of SGLang servers
    kernels        which of SGLang's kernels multiply by a packed base

Belongs here: rows, and asking them. Does not belong here: memory, layouts (`layout`, `serving`), installed packages,
what servers answer, the values of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from orbit_runtime.errors import UnsupportedError

State = Literal["works", "planned", "missing", "refused"]
"""`refused`: a pinned version cannot do it. `missing`: this version of Orbit lacks the part that would. `planned`: the
code exists but has not run on the hardware or files for which it is meant."""
Words = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that does not fit or is not supported."""

    message: str
    where: str
    fix: str
    fix_suffices: bool = False
    """Whether the fix resolves this problem completely; for memory, the changed run was checked to fit."""
    is_limit: bool = False
    """Whether it comes from the table, and no other machine of this kind would help."""

    def error(self) -> UnsupportedError:
        return UnsupportedError(self.message, where=self.where, fix=self.fix)


@dataclass(frozen=True, slots=True)
class SupportRow[S]:
    """One limit. Example: `SupportRow("adapter.lora.rslora", "SGLang", lambda asked: asked.rslora, "SGLang scales LoRA
    by alpha / rank", "leave it out")`"""

    what: str
    """The field under `spec` that the fix names first; empty if there is none."""
    beside: str
    """The other part of an unsupported combination, for readers."""
    when: Callable[[S], bool | Words | None]
    """Whether it applies; or the words that the texts have in braces."""
    why: str
    fix: str = ""
    state: State = "refused"

    def ask(self, subject: S) -> Problem | None:
        found = self.when(subject)
        if found is False or found is None:
            return None
        what, why, fix = self.what, self.why, self.fix
        if isinstance(found, Mapping):
            what, why, fix = (text.format_map(found) for text in (what, why, fix))
        return Problem(why, f"spec.{what}", fix, fix_suffices=True, is_limit=True)


def find_problems[S](rows: Iterable[SupportRow[S]], subject: S) -> Iterator[Problem]:
    return (found for row in rows if (found := row.ask(subject)) is not None)


def check_rows[S](rows: Iterable[SupportRow[S]], subject: S) -> None:
    """Raises UnsupportedError (78) with the first problem."""
    for problem in find_problems(rows, subject):
        raise problem.error()
