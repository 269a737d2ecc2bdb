"""The cluster's guides as programs: their blocks by section, in order.

Belongs here: reading Markdown. Does not belong here: running what it says (`shell`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs/guides/cluster"
GUIDES = ("install", "run", "operations", "security", "upgrade")
_FILE = re.compile(r"^# file: (\S+)\n")
_HEADING = re.compile(r"^#{1,4} (.+)$")
_INLINE = re.compile(r"`((?:kubectl|helm|orbit|make) [^`]+)`")


@dataclass(frozen=True)
class Block:
    """One fenced block. `number` counts those of the same language within its section."""

    guide: str
    section: str
    language: str
    text: str
    number: int

    @property
    def file(self) -> str | None:
        """Name of the file that the block is the content of, where it says so."""
        found = _FILE.match(self.text)
        return found[1] if found else None


@cache
def read_blocks(guide: str) -> tuple[Block, ...]:
    """All blocks of a guide."""
    blocks: list[Block] = []
    section, language, lines = "", "", list[str]()
    for line in (FOLDER / f"{guide}.md").read_text(encoding="utf-8").splitlines():
        if language and line == "```":
            number = sum((block.section, block.language) == (section, language) for block in blocks)
            blocks.append(Block(guide, section, language, "\n".join(lines) + "\n", number))
            language = ""
        elif language:
            lines.append(line)
        elif line.startswith("```"):
            language, lines = line[3:], []
        elif heading := _HEADING.match(line):
            section = heading[1]
    return tuple(blocks)


def find_block(guide: str, section: str, language: str = "sh", number: int = 0) -> Block:
    wanted = (section, language, number)
    found = [block for block in read_blocks(guide) if (block.section, block.language, block.number) == wanted]
    assert found, f"{guide}.md has no block {wanted}"
    return found[0]


def find_inline(guide: str) -> list[str]:
    """Commands in running text, such as `kubectl drain NODE`."""
    text = re.sub(r"```.*?```", "", (FOLDER / f"{guide}.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    return _INLINE.findall(text)
