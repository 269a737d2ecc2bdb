"""Runs `orbit` commands, each in a fork of one process that has imported everything: `python -P child.py light|heavy`.

Each line on stdin is a JSON object: `{"argv": [...], "folder": ..., "out": ..., "error": ...}`
starts one and is answered by its pid; `{"poll": pid}` is answered by its exit code, or null while it goes on.

Belongs here: what runs in the process of the product. Does not belong here: anything of `tools`, which this
process cannot import.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import runpy
import sys
from contextlib import redirect_stdout
from typing import Any

UNUSUAL = ("sglang_plugin", "kernels", "megatron", "__main__", "ray_")
"""Modules that import what only some machines or processes have."""


def import_all(*, heavy: bool) -> None:
    """Imports whatever a command would import; with `heavy` also torch and what comes with it."""
    import orbit_runtime

    if not heavy:
        sys.modules["torch"] = None  # type: ignore[assignment]
    else:
        for name in ("torch", "transformers", "transformers.models.qwen3.modeling_qwen3"):
            importlib.import_module(name)
    for found in pkgutil.walk_packages(orbit_runtime.__path__, "orbit_runtime.", onerror=lambda _: None):
        if not any(part in found.name for part in UNUSUAL):
            try:
                importlib.import_module(found.name)
            except ImportError:
                continue
    if not heavy:
        del sys.modules["torch"]
        # What each command would make anew: the manifest's schema.
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            carry_out(["validate", "examples/quickstart.yaml"])


def carry_out(argv: list[str]) -> int:
    """Exit code of a command in this process."""
    sys.argv = ["orbit", *argv]
    try:
        runpy.run_module("orbit_runtime", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def orbit(job: dict[str, Any]) -> int:
    """Carries out one command in this process, and returns its exit code."""
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, job["out"], os.O_WRONLY),
        (2, job["error"], os.O_WRONLY),
    ):
        opened = os.open(name, flags | os.O_CREAT | os.O_TRUNC, 0o644) if number else os.open(name, flags)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    os.chdir(job["folder"])
    return carry_out(job["argv"])


def main() -> int:
    import_all(heavy=sys.argv[1] == "heavy")
    answers = os.dup(1)
    os.dup2(2, 1)
    os.write(answers, b"{}\n")
    for line in sys.stdin:
        job = json.loads(line)
        if "poll" in job:
            pid, status = os.waitpid(job["poll"], os.WNOHANG)
            answer: dict[str, int | None] = {"code": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            pid = os.fork()
            if pid == 0:
                os.close(answers)
                return orbit(job)
            answer = {"pid": pid}
        os.write(answers, json.dumps(answer).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
