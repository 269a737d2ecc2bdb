"""A reward that looks around on the machine: what it finds of a secret, whom it can signal, what servers answer it."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Prompt = Sequence[Mapping[str, str]]


def look_around(
    completion: str, prompt: Prompt, fields: Mapping[str, Any], *, report: str, beginning: str, processes: list[int],
    files: list[str], urls: list[str],
) -> float:  # fmt: skip
    """Writes what it could do to `report`. `beginning` of the secret is given, so that it is known when it is seen."""
    found = {
        "seen in": sorted({name for name, data in everything(processes, files) if beginning.encode() in data}),
        "opened": sorted(opened(processes)),
        "signalled": [pid for pid in processes if can_signal(pid)],
        "answers": [ask(url) for url in urls],
        "variables": [name for name in os.environ if name.startswith("ORBIT_") and "TOKEN" in name],
        "temporary": own_file(),
    }
    Path(report).write_text(json.dumps(found))
    return 1.0


def everything(processes: list[int], files: list[str]) -> Iterator[tuple[str, bytes]]:
    for name in files + [f"/proc/{pid}/{what}" for pid in processes for what in ("cmdline", "environ")]:
        yield from read(name)
    for pid in processes:
        try:
            names = [str(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        for name in names:
            # A pipe would be emptied, or waited for.
            if os.path.isfile(name):
                yield from read(name)


def read(name: str) -> Iterator[tuple[str, bytes]]:
    try:
        with open(name, "rb") as file:
            yield name, file.read(1 << 24)
    except OSError:
        return


def opened(processes: list[int]) -> Iterator[str]:
    for pid in processes:
        for name in (f"/proc/{pid}/mem", f"/proc/{pid}/fd/0"):
            try:
                os.close(os.open(name, os.O_RDONLY))
                yield name
            except OSError:
                continue


def can_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def ask(url: str) -> int:
    body = json.dumps({"text": "1+1=", "sampling_params": {"max_new_tokens": 1}}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def own_file() -> str:
    """What a reward may well do."""
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"orbit-curious-{os.getpid()}"
    path.write_text("mine")
    try:
        return path.read_text()
    finally:
        path.unlink()
