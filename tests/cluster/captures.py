"""What kubectl prints of a run, for the operations guide: taken from the real thing, never written by hand.

`ORBIT_TEST_WRITE_GOLDEN=1` writes them into the guide anew; without it, what is printed must have the guide's shape:
the same lines in any order, names, numbers and times apart. What belongs together is one line: a condition, an ending.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from cluster.guide import FOLDER
from cluster.shell import Shell

GUIDE = FOLDER / "operations.md"
COMMANDS = (
    "kubectl get orun {run} --namespace team-a",
    "kubectl events --for orun/{run} --namespace team-a",
)
DESCRIBE = (
    "kubectl describe orun {run} --namespace team-a | sed '/^Metadata:/,/^Status:/d; /Transition Time\\|Observed/d'"
)
"""Without the manifest, and without the two lines of each condition that say when."""
WRITE = "ORBIT_TEST_WRITE_GOLDEN"
BLOCKS = {"Message": "Type", "Budget": "Who Acts"}
"""First and last line of what belongs together, where `kubectl describe` sorts fields by name."""
_VARIABLE = (
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME"),
    (r"(sha256|tree):[0-9a-f]+", "DIGEST"),
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "UID"),
    (r"(-a\d+)-[a-z0-9]{5}\b", r"\1-POD"),
    (r"\bb200-\d\b", "NODE"),
    (r"\bstep-\d{6}\b", "step-N"),
    (r"\b(\d+[dhms])+\b( \(x\d+ over \w+\))?", "AGE"),
    (r"(?<![\w-])-?\d+(\.\d+)?(e-?\d+)?\b", "N"),
    (r" +", " "),
)


def check_capture(shell: Shell, name: str, run: str) -> None:
    """Takes what is printed of a run now, and compares it with the guide, or writes it there."""
    taken = take(shell, run)
    text = GUIDE.read_text(encoding="utf-8")
    start, end = f"<!-- printed: {name} -->\n", f"<!-- end: {name} -->"
    before, _, rest = text.partition(start)
    shown, _, after = rest.partition(end)
    assert after, f"operations.md has no place for {name}"
    if os.environ.get(WRITE):
        GUIDE.write_text(f"{before}{start}{taken}{end}{after}", encoding="utf-8")
        return
    new, old = shape(taken), shape(shown)
    assert new == old, f"{name}: printed only now {sorted(new - old)}, printed only in the guide {sorted(old - new)}"


def take(shell: Shell, run: str) -> str:
    """Markdown: commands and what they print."""
    short = "".join(_session(shell, command.format(run=run)) for command in COMMANDS)
    long = _session(shell, DESCRIBE.format(run=run))
    return (
        f"```console\n{short}```\n\n<details><summary><code>kubectl describe orun {run}</code></summary>\n\n"
        f"```console\n{long}```\n\n</details>\n"
    )


def shape(text: str) -> set[str]:
    """Its lines, with everything that differs between two runs of the same kind replaced by what it is."""
    lines = set()
    for line in join_blocks(text.splitlines()):
        for pattern, word in _VARIABLE:
            line = re.sub(pattern, word, line)
        lines.add(line.strip())
    return lines


def join_blocks(lines: list[str]) -> Iterator[str]:
    """Each condition, from its message to its type, and each ending, from its budget to who acts, as one line."""
    block: list[str] = []
    for line in lines:
        name = line.strip().partition(":")[0]
        inner = line.startswith("    ")
        if (inner and name in BLOCKS) or block:
            block.append(line.strip())
            if not inner or name == BLOCKS[block[0].partition(":")[0]]:
                yield "; ".join(block)
                block = []
        else:
            yield line
    yield from block


def _session(shell: Shell, command: str) -> str:
    lines = (line.rstrip() for line in shell.run(command).splitlines())
    return "\n".join([f"$ {command}", *lines]) + "\n"


def captured() -> list[str]:
    """Names of all places in the guide."""
    return re.findall(r"<!-- printed: ([\w-]+) -->", Path(GUIDE).read_text(encoding="utf-8"))
