"""The command line's door: the commands' signatures, and every way out with its exit code.

Belongs here: arguments, help texts, and turning what a command raises into one message and a code.
Does not belong here: what a command does. Each imports its work when it is called, so that help stays fast.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.exceptions import TyperException

import orbit_runtime
from orbit_runtime.cli.apart import add_commands
from orbit_runtime.cli.arguments import AsJson, DryRun, Manifest, Out, Overrides
from orbit_runtime.cli.completion import complete_runs
from orbit_runtime.cli.data import data
from orbit_runtime.cli.hints import add_examples, usage_error
from orbit_runtime.cli.interrupts import end_stopped, interruptible
from orbit_runtime.errors import (
    EXIT_STOPPED,
    InternalError,
    OrbitError,
    OutOfMemoryError,
    StoppedOnRequest,
    is_out_of_memory,
)
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
        print(f"orbit {orbit_runtime.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    file: Manifest,
    out: Out = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train. Continues by itself if the run folder holds a checkpoint of the same run."""
    from orbit_runtime.cli.run import run_manifest

    raise typer.Exit(run_manifest(file, out=out, overrides=overrides or [], dry_run=dry_run, as_json=as_json))


add_commands(app)
app.add_typer(data)


@app.command()
def sft(
    file: Manifest,
    out: Out = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Learn from demonstrations. Like `run` with algorithm.type: SFT in the manifest; an RL run can start from the
    adapter (adapter.initFrom)."""
    from orbit_runtime.cli.run import run_manifest

    asked = [*(overrides or []), "spec.algorithm.type=SFT"]
    raise typer.Exit(run_manifest(file, out=out, overrides=asked, dry_run=dry_run, as_json=as_json))


@app.command()
def validate(file: Manifest, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a manifest and list everything that is wrong with it. Opens local prompts and rewards."""
    from orbit_runtime.cli.validate import run_validate

    run_validate(file, overrides or [], as_json)


@app.command()
def plan(
    file: Manifest,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Plan for this GPU, such as B200, instead of placement.gpuProduct."),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run needs and whether it fits. Part by part; needs no GPU and no download."""
    from orbit_runtime.cli.plan import run_plan

    raise typer.Exit(run_plan(file, overrides or [], gpu=gpu, as_json=as_json))


@app.command()
def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path("run.yaml"),
    full: Annotated[bool, typer.Option("--full", help="Include all fields, as comments with their defaults.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a manifest to start from. It runs as it is."""
    from orbit_runtime.cli.init import run_init

    run_init(path, force, as_json, full=full)


@app.command()
def inspect(
    uri: Annotated[
        str,
        typer.Argument(metavar="URI", help="A model's folder or address, an adapter's folder, or hf:// of a card."),
    ],
    precision: Annotated[
        str, typer.Option(metavar="FORMAT", help="Variant of a builtin:// model, such as NVFP4.")
    ] = "Auto",
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint or an adapter holds. Also what Orbit would do with it; reads headers only."""
    from orbit_runtime.cli.inspection import run_inspect

    run_inspect(uri, precision=precision, as_json=as_json)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The model's folder, or builtin://.")],
    destination: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write to, new or empty.")],
    precision: Annotated[
        str, typer.Option(metavar="FORMAT", help="INT4, FP8, NVFP4 or MXFP4; BF16 unpacks a packed model exactly.")
    ],
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Other layout of the format: INT4Asymmetric, FP8 (a scale per row), FP8BlockCT, NVFP4ModelOpt.",
        ),
    ] = None,
    group_size: Annotated[int | None, typer.Option(metavar="N", help="INT4: columns that share a scale. [32]")] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Leave these modules in BF16 too: a name, its last part, or re: and an expression. "
            "Repeatable. Head, embeddings, norms, routers and vision always stay in BF16.",
        ),
    ] = None,
    shard_gb: Annotated[float, typer.Option(metavar="GB", help="Maximum size of a file.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another format. Reports the error of every module; continues after an interruption."""
    from orbit_runtime.cli.convert import run_convert

    run_convert(
        source,
        destination,
        precision=precision,
        layout=layout,
        group_size=group_size,
        ignore=ignore or [],
        shard_gigabytes=shard_gb,
        as_json=as_json,
    )


@app.command()
def merge(
    adapters: Annotated[list[str], typer.Argument(metavar="ADAPTER...", help="Folders or URIs of saved adapters.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write to, new or empty.")],
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Merge into this base. By default, several adapters into one."),
    ] = None,
    precision: Annotated[str, typer.Option(metavar="FORMAT", help="Format of the merged model.")] = "BF16",
    weight: Annotated[
        list[float] | None, typer.Option(metavar="W", help="LoRA: weight of each adapter, in their order. [1]")
    ] = None,
    measure: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Prompts (JSONL) to measure the cost in log-probs on; none: do not measure.",
        ),
    ] = "built-in",
    unchecked_base: Annotated[
        bool, typer.Option("--unchecked-base", help="Accept adapters that do not name their base.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Merge adapters into their base, or into one adapter. Measures the cost in log-probs."""
    from orbit_runtime.cli.merge import Options, run_merge

    options = Options(base, precision, weight or [], measure, unchecked_base)
    run_merge(adapters, out, options, as_json=as_json)


@app.command()
def parity(
    file: Manifest,
    overrides: Overrides = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Compare layer by layer even if the gates hold. Needs engine: SGLang.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure how far trainer and engine differ. Before training; if too far, names the first layer, and why."""
    from orbit_runtime.cli.parity import run_parity

    raise typer.Exit(run_parity(file, overrides or [], layers=layers, as_json=as_json))


@app.command()
def serve(
    source: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run folder, or a manifest.", autocompletion=complete_runs),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="URI", help="Without a run: the base.")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="A model name and its adapter, or a run's newest. Repeatable."),
    ] = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Port 0 takes any free port.")] = "127.0.0.1:8000",
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the token for clients. [ORBIT_SERVE_TOKEN]")
    ] = None,
    updates_from: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER", help="/update_weights may load weights below this folder. Repeatable."),
    ] = None,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A limit, such as body-bytes=65536. Repeatable.")
    ] = None,
    engine: Annotated[
        Literal["Auto", "Torch", "SGLang"], typer.Option(help="Engine that samples. Auto: the run's own engine.")
    ] = "Auto",
    as_json: AsJson = False,
) -> None:
    """Serve base and adapters to OpenAI clients. Weights can change while it serves, with proof."""
    from orbit_runtime.cli.serve import ServeOptions, run_serve

    options = ServeOptions(source, model, adapter or [], listen, token_file, updates_from or [], limit or [], engine)
    raise typer.Exit(run_serve(options, as_json=as_json))


@app.command()
def chat(
    source: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run folder, or a manifest.", autocompletion=complete_runs),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="URI", help="Without a run: the base; with --base-url: the name of a model.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(metavar="FOLDER", help="An adapter's folder, or a run's.")] = None,
    step: Annotated[int | None, typer.Option(metavar="N", min=0, help="The run's adapter of this version.")] = None,
    base_url: Annotated[str | None, typer.Option(metavar="URL", help="An OpenAI-compatible API.")] = None,
    api_key_env: Annotated[str | None, typer.Option(metavar="NAME", help="Variable that holds the API's key.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Ask both base and adapter.")] = False,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Send this prompt and exit.")] = None,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", min=0.0, help="0 always takes the most likely token. [1]")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The same seed gives the same answer.")] = None,
    as_json: AsJson = False,
) -> None:
    """Talk to a checkpoint: base, adapter, or both."""
    from orbit_runtime.cli.chat import ChatOptions, run_chat

    settings = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    given = {name: value for name, value in settings.items() if value is not None}
    options = ChatOptions(source, model, adapter, step, base_url, api_key_env, compare, prompt, given)
    raise typer.Exit(run_chat(options, as_json=as_json))


@app.command()
def replay(
    run: Annotated[
        str, typer.Argument(metavar="DIR", help="A run folder: a path or URI.", autocompletion=complete_runs)
    ],
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Train only this many steps.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train again on a run's recorded rollouts. Needs no engine or rewards; every adapter must be the same."""
    from orbit_runtime.cli.replay import run_replay

    raise typer.Exit(run_replay(run, steps=steps, as_json=as_json))


@app.command("eval")
def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="FILE|DIR", help="A manifest, or a run folder.", autocompletion=complete_runs)
    ],
    out: Annotated[
        str | None, typer.Option(metavar="URI", help="Where to store samples and report. By default, next to the run.")
    ] = None,
    weights_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="The run folder whose saved adapters are measured.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="N,N", help="Only the adapters of these steps. [all that are saved]")
    ] = None,
    no_eval_base: Annotated[bool, typer.Option("--no-eval-base", help="Leave out the bare base.")] = False,
    adapter: Annotated[str | None, typer.Option(metavar="DIR", help="One adapter, in PEFT's format.")] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="An OpenAI-compatible API, such as http://127.0.0.1:8000/v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The API's model.")] = None,
    api_key_env: Annotated[str | None, typer.Option(metavar="VAR", help="Variable that holds the API's key.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model with which others are compared. [the first]")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure models on prompts. The base, a run's checkpoints, or an API; continues after an interruption."""
    from orbit_runtime.cli.evaluate import Models, run_eval

    models = Models(weights_dir, steps, not no_eval_base, adapter, base_url, api_key_env, model, against)
    raise typer.Exit(run_eval(target, models, out=out, overrides=overrides or [], as_json=as_json))


@app.command()
def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="DIR", help="Run folders: paths or URIs.", autocompletion=complete_runs)
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write the page here instead of into a local run's own folder.")
    ] = None,
    margin: Annotated[
        float, typer.Option(metavar="REWARD", help="For several runs: the smallest difference that matters.")
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Report one run, or compare several with the first. A run need not be finished."""
    from orbit_runtime.cli.report import run_report

    run_report(runs, html=html, margin=margin, as_json=as_json)


@app.command("ls")
def list_runs(
    uri: Annotated[
        str, typer.Argument(metavar="URI", help="A folder of runs, or one run.", autocompletion=complete_runs)
    ] = "runs",
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder. Shows step, reward, state, last checkpoint and size."""
    from orbit_runtime.cli.ls import run_ls

    run_ls(uri, as_json)


@app.command()
def agent(
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Port on the loopback interface.")] = 9401,
) -> None:
    """Start engine servers for a run in the pod's other container."""
    from orbit_runtime.workers.servers.agent import run_agent

    run_agent(port)


@app.command()
def doctor(
    store: Annotated[str | None, typer.Option(metavar="URI", help="Also write to and read from this store.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what this machine can run and what is missing."""
    from orbit_runtime.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(store, as_json))


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


def run_command(arguments: Sequence[str]) -> int:
    """One command; returns its exit code."""
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
        return _crash(error, arguments, as_json)


def _fail(error: OrbitError, as_json: bool) -> int:
    from orbit_runtime.observability.last_words import add_last_words, words_of

    add_last_words(words_of(error))
    if as_json:
        print(json.dumps(error.to_json(), default=str))
    else:
        said = str(error) if isinstance(error, StoppedOnRequest) else f"error: {error}"
        print(said, file=sys.stderr)
    return error.exit_code


def _crash(error: BaseException, arguments: Sequence[str], as_json: bool) -> int:
    from orbit_runtime.cli.crash import write_crash_report

    path = write_crash_report(error, arguments)
    place = str(path) if path else "nowhere: neither the working folder nor the temporary one can be written"
    what = InternalError(
        f"a bug in Orbit: {type(error).__name__}: {error}",
        fix=f"please open an issue and attach the report file: {place}",
    )
    return _fail(what, as_json)


def _silence_stdout() -> None:
    """The reader of a pipe is gone; the interpreter must not complain about it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
