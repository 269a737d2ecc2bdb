"""Runs stages one after the other, each in a process with a time limit, and keeps what each of them found.

Belongs here: order, limit, what is skipped. Does not belong here: options (`__main__`), what a stage does (`stages`).
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from tools.gpu_proof.record import BAD, Record
from tools.gpu_proof.stages import STAGES

STAGE_SECONDS = 480.0
LAST_LINES = 60
"""Of a stage's output, kept where it ends without having said why."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    # Without it cuBLAS takes its workspace as it comes, and sums in another order.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
TIMED = ("kernel_speed", "rotation_speed", "rl_step", "recompute")
NO_TIMES = "it runs; times and memory not measured: no card"
"""What a stage of `TIMED` shows at the smallest sizes."""
TINY_ENVIRONMENT = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_stages(
    names: Iterable[str],
    folder: Path,
    facts: Mapping[str, Any],
    *,
    again: bool,
    seconds: float = STAGE_SECONDS,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Record]:
    """The record of each, those of this commit that were there already included.

    Args:
        folder: of this card's records.
        facts: what every record says of card, versions and commit; `tiny` among them.
        again: measures what was measured on this commit as well.
        seconds: longest that a stage may take; what it found until then is kept.
        variables: of every stage's process, beside those of this one.
    """
    records = {}
    for name in names:
        path = folder / f"{name}.json"
        before = Record.read(path)
        if before is not None and not again and is_current(before, facts):
            print(f"== {name}: {in_words(before)} (this commit's result; --again measures anew)", flush=True)
            records[name] = before
            continue
        print(f"== {name}", flush=True)
        records[name] = run_stage(name, path, facts, seconds, variables or {})
        print(f"== {name}: {in_words(records[name])}", flush=True)
    return records


def is_current(record: Record, facts: Mapping[str, Any]) -> bool:
    """Whether it came to its end on the code that is here now; code that no commit has is never the same."""
    same = all(record.content.get(key) == facts[key] for key in ("commit", "tiny", "card"))
    return same and bool(facts["commit"]) and not facts["dirty"] and record.status != "running"


def run_stage(name: str, path: Path, facts: Mapping[str, Any], seconds: float, variables: Mapping[str, str]) -> Record:
    Record.begin(path, name, facts)
    environment = {**os.environ, **ENVIRONMENT, **variables}
    command = [sys.executable, "-m", "tools.gpu_proof.stages", name, str(path.resolve())]
    output: deque[str] = deque(maxlen=LAST_LINES)
    overdue = threading.Event()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    ) as running:  # fmt: skip

        def stop() -> None:
            overdue.set()
            _end(running)

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            assert running.stdout is not None
            for line in running.stdout:
                print(line, end="", flush=True)
                output.append(line)
            status = running.wait()
        finally:
            timer.cancel()
            _end(running)
    record = Record.read(path)
    assert record is not None
    if record.status == "running":
        if overdue.is_set():
            record.end("out of time", f"stopped after {seconds:.0f} s; what it had found is kept", "".join(output))
        else:
            record.end("failed", f"its process ended with {status}", "".join(output))
    return record


def in_words(record: Record) -> str:
    why = record.content.get("why")
    return f"{record.status.upper()}{f': {why}' if why else ''} ({record.content.get('seconds', 0)} s)"


def page(facts: Mapping[str, Any], records: Mapping[str, Record]) -> str:
    """What a person reads: whether it works, then each stage by the question that it answers."""
    bad = [name for name, record in records.items() if record.status in BAD]
    lines = [f"Orbit on {facts['card']}, torch {facts['torch']}, commit {str(facts['commit'])[:12]}"]
    if facts["tiny"]:
        lines.append(
            "Smallest sizes, kernels interpreted: the stages run; nothing was compiled for a card or measured."
        )
    lines.append(f"DOES NOT WORK: {', '.join(bad)}" if bad else "Nothing that ran failed.")
    asked = [name for name in STAGES if name in records]
    for question, names in itertools.groupby(asked, key=lambda name: STAGES[name].question):
        lines += ["", question]
        for name in names:
            record = records[name]
            shows = NO_TIMES if facts["tiny"] and STAGES[name].module in TIMED else STAGES[name].shows
            why = record.content.get("why") or shows
            lines.append(f"  {record.status:12}  {name:21}  {record.content.get('seconds', 0):5.0f} s  {why}")
    return "\n".join(lines)


def exit_status(records: Mapping[str, Record]) -> int:
    return int(any(record.status in BAD for record in records.values()))


def _end(running: subprocess.Popen[str]) -> None:
    """With all that it started: they are one session, and a device is free once the last of them is gone."""
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
