"""Compares what the product does with `tests/data/same_behaviour`, or records it there: `make same-behaviour`.

    python -m tools.same_behaviour                      everything; exits with 1 where something differs
    python -m tools.same_behaviour plan messages        some groups
    python -m tools.same_behaviour --take               records the values of the commit that is checked out
    python -m tools.same_behaviour --product FOLDER     the product of another checkout

Digests and a CPU's plans depend on the machine, whose description stands in their files. On another machine the values
are first taken from the commit that the file names, in a checkout of it, and compared with these.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tools.same_behaviour import runs, texts
from tools.same_behaviour.product import Product, worktree

ROOT = Path(__file__).parents[2]
VALUES = ROOT / "tests" / "data" / "same_behaviour"


@dataclass(frozen=True)
class Group:
    record: Callable[[Product], Iterator[str]]
    is_local: bool = False
    """Whether its values depend on the machine."""


GROUPS = {
    "help": Group(texts.help_texts),
    "fields": Group(texts.fields),
    "validate": Group(texts.validated),
    "plan": Group(texts.planned, is_local=True),
    "dry-run": Group(texts.dry_runs),
    "servers": Group(texts.servers),
    "messages": Group(texts.messages),
    "golden": Group(texts.golden),
    "earlier": Group(runs.earlier, is_local=True),
    "runs": Group(runs.in_one_process, is_local=True),
    "ranks": Group(runs.ranks, is_local=True),
    "processes": Group(runs.processes, is_local=True),
    "resumed": Group(runs.resumed, is_local=True),
}


def machine() -> str:
    """What rounding, and the plan of a CPU, depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{name}, {os.cpu_count()} cores, {memory} bytes, torch {version('torch')}"


def commit_of(root: Path) -> str:
    git = ["git", "-C", str(root)]
    changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    named = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True)
    return named.stdout.strip() + (" and changes" if changed.stdout.strip() else "")


def record(root: Path, names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each group with its lines, as the product of `root` gives them."""
    with tempfile.TemporaryDirectory() as scratch, closing(Product(root, Path(scratch))) as product:
        for name in names:
            began = time.monotonic()
            lines = list(GROUPS[name].record(product))
            print(f"{name}: {len(lines)} lines, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            yield name, lines


def record_commit(commit: str, names: list[str]) -> Iterator[tuple[str, list[str]]]:
    with tempfile.TemporaryDirectory() as folder, worktree(ROOT, commit, Path(folder, "checkout")) as root:
        print(f"values of {commit}:", file=sys.stderr, flush=True)
        yield from record(root, names)


def take(root: Path, names: list[str]) -> None:
    VALUES.mkdir(parents=True, exist_ok=True)
    here = commit_of(root)
    for name, lines in record(root, names):
        head = [f"# commit: {here}", f"# machine: {machine() if GROUPS[name].is_local else 'any'}"]
        (VALUES / f"{name}.txt").write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")


def kept(names: list[str]) -> dict[str, list[str]]:
    """What each group is compared with."""
    found: dict[str, list[str]] = {}
    elsewhere: dict[str, list[str]] = {}
    for name in names:
        commit, of, *lines = (VALUES / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        if of in ("# machine: any", f"# machine: {machine()}"):
            found[name] = lines
        else:
            elsewhere.setdefault(commit.removeprefix("# commit: "), []).append(name)
    for commit, absent in elsewhere.items():
        found |= dict(record_commit(commit, absent))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; none: all")
    parser.add_argument("--take", action="store_true", help="record the values instead of comparing")
    parser.add_argument("--product", type=Path, default=ROOT, help="the checkout to read")
    given = parser.parse_args()
    if unknown := set(given.groups) - GROUPS.keys():
        parser.error(f"no group is called {', '.join(sorted(unknown))}")
    names = [name for name in GROUPS if name in given.groups or not given.groups]
    if given.take:
        take(given.product, names)
        return 0
    expected = kept(names)
    differing = []
    for name, now in record(given.product, names):
        lines = list(difflib.unified_diff(expected[name], now, f"{name}, kept", f"{name}, now", lineterm=""))
        if lines:
            print(*lines, sep="\n", flush=True)
            differing.append(name)
    print(f"differs: {', '.join(differing)}" if differing else f"the same: {', '.join(names)}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
