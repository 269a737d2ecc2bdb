"""`docs/reference/sglang.md`: format x family x adapter that SGLang serves, as the planner's table has it.

Belongs here: the tables of the page. Does not belong here: its prose (`sglang.md.in`), what the tables say
(`planner.support`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from orbit_runtime.planner.support.combinations import (
    FAMILY_NAMES,
    FORMATS,
    MOE_FAMILIES,
    PINNED,
    Combination,
    find_support,
)
from orbit_runtime.planner.support.kernels import LORA_RUNNERS

LAYOUTS = ("SharedOuter", "Shared", "PerExpert", "None")
TEMPLATE = Path(__file__).with_name("sglang.md.in")


@dataclass
class Reasons:
    """Numbered in the order in which they are met."""

    found: dict[str, int] = field(default_factory=dict)

    def numbers(self, reasons: tuple[str, ...]) -> str:
        return ", ".join(str(number) for number in sorted({self._number(reason) for reason in reasons}))

    def _number(self, reason: str) -> int:
        return self.found.setdefault(reason, len(self.found) + 1)


def render_page() -> str:
    reasons = Reasons()
    parts = {
        "version": PINNED["sglang"],
        "on_cpu": _table(0, reasons),
        "on_gpu": _table(1, reasons),
        "runners": "\n".join(f"| {layout} | `{runner}` |" for layout, runner in LORA_RUNNERS.items()),
        "reasons": "\n".join(f"{number}. {reason}" for reason, number in reasons.found.items()),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


def _table(num_gpus: int, reasons: Reasons) -> str:
    """Families of equal rows stand together."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for family, adapter, experts, adapts_down in _asked(num_gpus):
        cells = [
            _cell(Combination(form, family, adapter, experts, "SGLang", "Torch", num_gpus, False, adapts_down), reasons)
            for form in FORMATS
        ]
        named = "" if family not in MOE_FAMILIES else experts if adapts_down else f"{experts}, no `down_proj`"
        rows.setdefault((adapter, named, *cells), []).append(f"`{family}`")
    head = f"| family | adapter | experts | {' | '.join(FORMATS)} |\n|{'---|' * (3 + len(FORMATS))}\n"
    return head + "\n".join(f"| {', '.join(names)} | {' | '.join(row)} |" for row, names in rows.items())


def _asked(num_gpus: int) -> Iterator[tuple[str, str, str, bool]]:
    """(family, adapter, layout of experts, whether down_proj is a target)."""
    for family in FAMILY_NAMES:
        for adapter in ("LoRA", "OFT"):
            for experts in LAYOUTS if family in MOE_FAMILIES else ("None",):
                yield family, adapter, experts, True
                if num_gpus and adapter == "OFT" and experts == "Shared":
                    yield family, adapter, experts, False


def _cell(asked: Combination, reasons: Reasons) -> str:
    found = find_support(asked)
    if found.state == "works":
        return "yes"
    is_written = all(reason.endswith("not run on hardware") for reason in found.reasons)
    word = "no" if found.state == "refused" else "written" if is_written else "not yet"
    return f"{word} ({reasons.numbers(found.reasons)})"
