"""`orbit serve`: base and adapters behind an OpenAI-compatible port, until it is stopped.

Belongs here: arguments, the token, stopping. Does not belong here: what is answered (`serve`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import MutableMapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from orbit_runtime.cli.output import AsJson, complete_runs, format_json
from orbit_runtime.errors import EXIT_DONE, UsageError

if TYPE_CHECKING:
    from orbit_runtime.serve.requests import ServeLimits


def serve(
    source: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="A run folder or RUN@step-12, or a manifest.", autocompletion=complete_runs),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="URI", help="Without a run: the base.")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="A model name and its adapter, such as RUN@best. Repeatable."),
    ] = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Port 0 takes any free port.")] = "127.0.0.1:8000",
    port: Annotated[int | None, typer.Option(metavar="PORT", min=0, max=65535, help="The port of --listen.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the token for clients. [ORBIT_SERVE_TOKEN]")
    ] = None,
    update_token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File with the token that alone may change weights. [ORBIT_SERVE_UPDATE_TOKEN]"
        ),
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
) -> int:
    """Serve base and adapters to OpenAI clients. Weights can change while it serves, with proof.

    \f
    Serves until SIGINT or SIGTERM; then what is under way is finished. Returns 0.

    Raises:
        UsageError: (64) an option is impossible, or others could ask without a token. OutputError: (73) the port is
        taken. OrbitError: model or adapters cannot be served.
    """
    from orbit_runtime.api.checks import check_can_train
    from orbit_runtime.workers.child.run_token import SERVE_VARIABLE, UPDATE_VARIABLE

    if port is not None:
        listen = f"{listen.rpartition(':')[0]}:{port}"
    host, port, token = read_door(listen, token_file, SERVE_VARIABLE)
    update_token = read_token(update_token_file, os.environ, UPDATE_VARIABLE)
    limits = read_limits(limit or [])
    adapters = dict(_named(each) for each in adapter or [])
    check_named(source, model, list(adapters.values()))
    check_can_train()
    from orbit_runtime.observability.server import check_port

    check_port(host, port)
    folder = fetch_named(model)
    to_stderr("importing torch")
    from orbit_runtime.serve.open import ServeRequest, open_models
    from orbit_runtime.serve.server import start_serving
    from orbit_runtime.workers.child.signals import stop_on_signals

    stopped = threading.Event()
    with stop_on_signals() as stop:
        stop.on_request = stopped.set
        asked = ServeRequest(source, model, folder, adapters, tuple(updates_from or ()), engine)
        with closing(open_models(asked, limits, to_stderr)) as opened:
            serving = start_serving(opened, host, port, token, update_token)
            names = [each.name for each in opened.policies.all()]
            print(
                format_json({"url": serving.url, "models": names})
                if as_json
                else f"serving {', '.join(names)} at {serving.url}/v1"
            )
            sys.stdout.flush()
            # In pieces, so that Python's own handler of a signal gets its turn.
            while not stopped.wait(0.5):
                serving.check()
            serving.close()
    return EXIT_DONE


def check_named(source: str | None, model: str | None, adapters: Sequence[str]) -> None:
    """Checks the names on this machine before torch is imported, which takes seconds.

    Raises:
        UsageError: neither or both of run and model are named, an address is none, a local folder is not there, or a
            run has not the adapter that was named.
        ModelError: the model's folder is not there, or holds no model.
    """
    from orbit_runtime.checkpoints.adapter_folder import adapter_address, split_address
    from orbit_runtime.cli.addresses import local_folder
    from orbit_runtime.model_info.settings import check_model_folder
    from orbit_runtime.serve.names import check_one_source
    from orbit_runtime.spec.hub_address import MODEL_FORM, is_model_address

    check_one_source(source, model)
    if model is not None:
        if model.startswith("hf://") and not is_model_address(model):
            raise UsageError(
                f"{model} is not the address of a model on a hub", where="--model", fix=f"write {MODEL_FORM}"
            )
        if (folder := local_folder(model)) is not None:
            check_model_folder(folder, "correct --model")
    for where, what in ((source, "run folder or manifest"), *((each, "adapter or run folder") for each in adapters)):
        if where is not None and "://" not in where and not Path(split_address(where)[0]).exists():
            raise UsageError(f"there is no such {what}", where=where, fix="check the path; `orbit ls` lists runs")
        if where is not None and split_address(where)[1]:
            adapter_address(where)
    source = source and split_address(source)[0]
    if source is not None and Path(source).is_dir() and not Path(source, "run.json").exists():
        raise UsageError("there is no run here", where=source, fix="name a run folder; `orbit ls` lists them")


def fetch_named(model: str | None) -> Path | None:
    """Downloads a remote model before torch is imported, so that an unreachable hub is reported at once and Ctrl-C ends
    it. None: the model is on this machine, or a run names it.

    Raises: see `fetch_input`.
    """
    from orbit_runtime.cli.addresses import local_folder

    if model is None or local_folder(model) is not None:
        return None
    from orbit_runtime.sides.inputs import fetch_model

    return fetch_model(model, to_stderr)


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def read_door(listen: str, token_file: Path | None, variable: str) -> tuple[str, int, str | None]:
    """Host, port and token of a port that answers others.

    Args:
        variable: of the environment, that holds the token where no file does.

    Raises:
        UsageError: one of them is impossible, or others could ask without a token.
    """
    from orbit_runtime.ports.guard import LOOPBACK

    host, port = read_address(listen)
    token = read_token(token_file, os.environ, variable)
    if token is None and host not in LOOPBACK:
        raise UsageError(
            f"anyone who can reach {host} could send requests",
            where="--listen",
            fix=f"set {variable} or --token-file, or listen on 127.0.0.1",
        )
    return host, port, token


def read_token(file: Path | None, environment: MutableMapping[str, str], variable: str) -> str | None:
    """The token that clients must bring; None: none was set. Its variable is taken away: no child inherits it.

    Raises:
        UsageError: the file cannot be read, or the token is empty or no plain text.
    """
    token = environment.pop(variable, None)
    if file is None:
        where = variable
    else:
        where = str(file)
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            fix = "name a readable text file with --token-file"
            raise UsageError(f"the token cannot be read: {error}", where=where, fix=fix) from None
    if token is None:
        return None
    if not token:
        fix = "write a token into it, or leave --token-file out" if file else f"give it a token, or `unset {variable}`"
        raise UsageError("the token is empty", where=where, fix=fix)
    if not token.isascii() or not token.isprintable() or " " in token:
        fix = "write it without spaces, line breaks and letters beyond ASCII; `openssl rand -hex 32` makes one"
        raise UsageError("the token is not plain letters, digits and signs", where=where, fix=fix)
    return token


def read_limits(given: Sequence[str]) -> ServeLimits:
    """Raises UsageError for a name that is none, or a value that is no positive number."""
    from orbit_runtime.serve.requests import ServeLimits

    names = {each.name.replace("_", "-"): each.name for each in fields(ServeLimits)}
    limits = ServeLimits()
    for each in given:
        name, _, value = each.partition("=")
        if name not in names:
            raise UsageError(f"there is no limit {name!r}", where="--limit", fix=f"use {', '.join(names)}")
        kind = type(getattr(limits, names[name]))
        try:
            number = kind(value)
        except ValueError:
            number = 0
        if not 0 < number < float("inf"):
            raise UsageError(f"{value!r} is not a positive number", where=f"--limit {name}")
        limits = replace(limits, **{names[name]: number})
    return limits


def read_address(listen: str) -> tuple[str, int]:
    """Raises UsageError for what is no HOST:PORT."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            f"{listen!r} is not an address", where="--listen", fix="write HOST:PORT, such as 127.0.0.1:8000"
        )
    return host.strip("[]"), int(port)


def _named(each: str) -> tuple[str, str]:
    name, separator, folder = each.partition("=")
    if not separator or not name or not folder:
        raise UsageError(f"{each!r} names no adapter", where="--adapter", fix="write NAME=FOLDER")
    return name, folder
