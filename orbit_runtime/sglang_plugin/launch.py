"""`python -m orbit_runtime.sglang_plugin.launch ARGUMENTS`: an SGLang server with Orbit's plug-in.

SGLang's children are spawned and import this file again, so its top-level code runs in each of them.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.sglang_plugin import activate, cpu
from orbit_runtime.workers.child.run_token import token_from_pipe
from orbit_runtime.workers.servers.process import (
    INSTALL,
    PARENT_VARIABLE,
    VERSION_VARIABLE,
    check_version,
)
from orbit_runtime.workers.servers.protocol import VARIABLE


def _check_version() -> None:
    """Runs before the base is loaded, which takes long. Raises UnsupportedError (78): no SGLang, or a wrong version."""
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as missing:
        raise UnsupportedError(
            f"SGLang is not installed for {sys.executable}",
            where="spec.rollout.engine",
            fix=INSTALL,
        ) from missing
    if os.environ.get(VERSION_VARIABLE) != "Any":
        check_version(found, name=sys.executable)


def _refuse(error: UnsupportedError) -> NoReturn:
    """Writes the last line of the log, which `workers.servers.process` turns into the error again."""
    print(json.dumps(error.to_json()), file=sys.stderr)
    sys.exit(error.exit_code)


try:
    _check_version()
except UnsupportedError as refused:
    _refuse(refused)
os.environ.update({VARIABLE: "1"})
if "cpu" in sys.argv:
    # SGLang's compilation for a CPU would take a minute at the first request, and needs a C++ compiler.
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", TORCHDYNAMO_DISABLE="1")
    # Several processes would initialise NCCL, which torch's CUDA wheel includes; if none is found they use gloo.
    os.environ.update(SGLANG_NCCL_SO_PATH="/nonexistent/libnccl.so")
    cpu.install()
activate()


def main() -> None:
    # The parent may have died during this process's imports, in which case it has another parent by now.
    parent = int(os.environ.get(PARENT_VARIABLE) or os.getppid())
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    token = token_from_pipe()
    own = sys.argv[1:]
    if unknown := _unknown(own):
        _refuse(
            UnsupportedError(
                f"the SGLang that is installed does not know {', '.join(unknown)}",
                where="spec.rollout.engineArguments",
                fix="remove them, or install the SGLang that this version of Orbit is made for",
            )
        )
    if token is not None:
        # Only in these arguments, not in those that the system shows for this process.
        # One word: a token may begin with a dash, which would make it a flag.
        own += [f"--api-key={token}"]
        _keep_from_log(token)
    arguments = prepare_server_args(own)
    # No images are sent. For Kimi-K2.6 SGLang would otherwise want its image processor, which is the publisher's code;
    # `--language-model-only` does not know it, and the flag of this field cannot be negated.
    arguments.enable_multimodal = False
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _unknown(arguments: Sequence[str]) -> list[str]:
    """Flags that this SGLang has no field for; detected before a model is opened."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    return sorted({each for each in arguments if each.startswith("--")} - known)


def _keep_from_log(token: str) -> None:
    """SGLang writes all its arguments to the log."""

    def hide(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if token in message:
            record.msg, record.args = message.replace(token, "***"), ()
        return True

    logging.getLogger("sglang.srt.entrypoints.engine").addFilter(hide)


def _end_with_parent(parent: int) -> None:
    """A killed run cannot stop its server, so the server detects it and terminates with all its children."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
