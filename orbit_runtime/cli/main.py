"""The command line's door: the commands by name, and every way out with its exit code.

Belongs here: turning what a command raises into one message and a code, and Ctrl-C from the first import of a command
to its last line. Does not belong here: commands; each imports its work when it is called, so that help stays fast.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from orbit_runtime.cli.chat import chat
from orbit_runtime.cli.convert import convert
from orbit_runtime.cli.data import data
from orbit_runtime.cli.doctor import doctor
from orbit_runtime.cli.evaluate import evaluate
from orbit_runtime.cli.hints import add_examples, usage_error
from orbit_runtime.cli.init import init
from orbit_runtime.cli.inspection import inspect
from orbit_runtime.cli.ls import list_runs
from orbit_runtime.cli.merge import merge
from orbit_runtime.cli.parity import parity
from orbit_runtime.cli.plan import plan
from orbit_runtime.cli.replay import replay
from orbit_runtime.cli.report import report
from orbit_runtime.cli.run import run, sft
from orbit_runtime.cli.serve import serve
from orbit_runtime.cli.sides import inference, orchestrator, rl, trainer
from orbit_runtime.cli.trial import try_run
from orbit_runtime.cli.validate import validate
from orbit_runtime.errors import (
    EXIT_STOPPED,
    InternalError,
    OrbitError,
    OutOfMemoryError,
    StoppedOnRequest,
    UnsupportedError,
    UsageError,
    gpu_fault,
    is_out_of_memory,
    too_many_files,
)
from orbit_runtime.observability.logs import printable_output
from orbit_runtime.version import __version__
from orbit_runtime.workers.child.heartbeat import end_process, own_process, watch_stalls

COMPLETION_VARIABLE = "_ORBIT_COMPLETE"
"""Set by the script that `--install-completion` writes."""

app = typer.Typer(
    name="orbit",
    help="RL post-training of adapters on a frozen, quantised base: one manifest, one command.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"orbit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def agent(
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Port on the loopback interface.")] = 9401,
) -> None:
    """Start engine servers for a run in the pod's other container."""
    from orbit_runtime.workers.servers.agent import run_agent

    run_agent(port)


COMMANDS: Mapping[str, Callable[..., int | None]] = {
    "run": run,
    "rl": rl,
    "trainer": trainer,
    "inference": inference,
    "orchestrator": orchestrator,
    "sft": sft,
    "validate": validate,
    "plan": plan,
    "try": try_run,
    "init": init,
    "inspect": inspect,
    "convert": convert,
    "merge": merge,
    "parity": parity,
    "serve": serve,
    "chat": chat,
    "replay": replay,
    "eval": evaluate,
    "report": report,
    "ls": list_runs,
    "agent": agent,
    "doctor": doctor,
}
"""Commands in the order of the help. A command returns its exit code, or None for 0."""

for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(data)
add_examples(app)


def main(argv: Sequence[str] | None = None) -> None:
    """The console script. Never returns: every ending is an exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    own_process()
    # The interpreter's last collection would walk through all of torch and transformers, for more than a second.
    atexit.register(gc.freeze)
    with watch_stalls(end_process):
        code = interruptible(run_command, arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
    if code == EXIT_STOPPED:
        end_stopped()
    sys.exit(code)


def interruptible[T](command: Callable[[T], int], given: T) -> int:
    """Calls a command, within which Ctrl-C raises KeyboardInterrupt; afterwards it ends the process with its code.

    Until now it ended the process (`__main__`). Where it is ignored, or handled by somebody else, that stays so.
    """
    before = signal.getsignal(signal.SIGINT)
    is_ours = callable(before) and threading.current_thread() is threading.main_thread()
    code = EXIT_STOPPED

    def end(_number: int, _frame: FrameType | None) -> None:
        os._exit(code)

    try:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = command(given)
    except KeyboardInterrupt:
        # Before the command began, or again while the first one was being answered.
        print("stopped on request", file=sys.stderr)
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, end)
    return code


def end_stopped() -> NoReturn:
    """Ends this process with 75, as `sys.exit` does where nothing was interrupted.

    A KeyboardInterrupt that passes through code which a C library runs makes Python end itself by SIGINT, whoever
    handled it since; a shell's script then takes the command for one that was killed.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(EXIT_STOPPED)


def run_command(arguments: Sequence[str]) -> int:
    """One command; returns its exit code."""
    with printable_output():
        return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    as_json = "--json" in arguments
    command = typer.main.get_command(app)
    # A shell asks for completions without arguments, and would show the help at each TAB.
    if not arguments and COMPLETION_VARIABLE not in os.environ:
        with command.make_context("orbit", [], resilient_parsing=True) as context:
            print(command.get_help(context), file=sys.stderr)
    try:
        result = command.main(args=list(arguments), prog_name="orbit", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        # 130 is what typer makes of Ctrl-C; for Orbit that is a stop on request.
        if code == 130:
            print("stopped on request", file=sys.stderr)
            return EXIT_STOPPED
        return code
    except TyperException as error:
        return _fail(usage_error(error, arguments), as_json)
    except InternalError as error:
        return _crash(error, arguments, as_json)
    except OrbitError as error:
        return _fail(error, as_json)
    except (KeyboardInterrupt, typer.Abort):
        print("stopped on request", file=sys.stderr)
        return EXIT_STOPPED
    except BrokenPipeError:
        _silence_stdout()
        return 0
    except SystemExit as error:
        # typer's own answer to a reader that has left.
        if isinstance(error.__context__, BrokenPipeError):
            _silence_stdout()
            return 0
        raise
    except BaseException as error:
        if is_out_of_memory(error):
            what = OutOfMemoryError(f"memory ran out: {error}", fix="a machine with more memory, or a smaller model")
            return _fail(what, as_json)
        if (fault := gpu_fault(error)) is not None:
            return _fail(fault, as_json)
        return _crash(error, arguments, as_json)


def _fail(error: OrbitError, as_json: bool) -> int:
    import json

    from orbit_runtime.observability.termination_message import add_last_words, build_message

    add_last_words(build_message(error))
    if as_json:
        print(json.dumps(error.to_json(), default=str))
    else:
        if error.exit_code == UsageError.exit_code and (error.where or "").startswith("spec."):
            from orbit_runtime.spec.load import find_place

            error.where = find_place(error.where or "")
        said = str(error) if isinstance(error, StoppedOnRequest) else f"error: {error}"
        print(said, file=sys.stderr)
    return error.exit_code


def _crash(error: BaseException, arguments: Sequence[str], as_json: bool) -> int:
    from orbit_runtime.cli.crash import write_crash_report

    if too_many_files(error):
        what = UnsupportedError(
            "this process may not open more files at once", where="ulimit -n", fix="raise the limit: ulimit -n 4096"
        )
        return _fail(what, as_json)
    path = write_crash_report(error, arguments)
    place = str(path) if path else "nowhere: neither the working folder nor the temporary one can be written"
    bug = InternalError(
        f"a bug in Orbit: {type(error).__name__}: {error}",
        fix=f"please open an issue and attach the report file: {place}",
    )
    return _fail(bug, as_json)


def _silence_stdout() -> None:
    """The reader of a pipe is gone; the interpreter must not complain about it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
