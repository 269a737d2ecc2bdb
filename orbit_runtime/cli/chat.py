"""`orbit chat`: a conversation with base, adapter or both, over its own engine or an OpenAI-compatible API.

Belongs here: the conversation at a terminal or a pipe. Does not belong here: what is answered (`serve`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TextIO

import typer

from orbit_runtime.cli.output import AsJson, complete_runs
from orbit_runtime.errors import EXIT_DONE, CredentialsError, EngineDiedError, UsageError

if TYPE_CHECKING:
    import httpx

    from orbit_runtime.cli.side_by_side import ModelAnswer, Pieces

HELP = "/reset forgets the conversation, /quit ends, /help says this, Ctrl-C ends an answer"
FIRST_SECONDS = 600.0


class ChatOptions(NamedTuple):
    """The options of `orbit chat`."""

    source: str | None
    model: str | None
    """The base's address, if there is no run; with `base_url`, the model's name."""
    adapter: str | None
    step: int | None
    base_url: str | None
    api_key_env: str | None
    compare: bool
    prompt: str | None
    settings: Mapping[str, Any]
    """Settings of sampling, under their names in OpenAI's API."""


Conversations = Mapping[str, list[dict[str, str]]]
"""Model → messages so far."""


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
) -> int:
    """Talk to a checkpoint: base, adapter, or both."""
    settings = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    given = {name: value for name, value in settings.items() if value is not None}
    options = ChatOptions(source, model, adapter, step, base_url, api_key_env, compare, prompt, given)
    return run_chat(options, as_json=as_json)


def run_chat(options: ChatOptions, *, as_json: bool) -> int:
    """Talks until the input ends. Returns 0.

    Raises:
        UsageError: (64) options do not go together, or the API refuses the request.
        CredentialsError: (77) the API wants another key. EngineDiedError: (82) it does not answer.
        OrbitError: model or adapter cannot be served.
    """
    import httpx

    with ExitStack() as stack:
        url, key, names = _find_models(options, stack)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        client = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=FIRST_SECONDS))
        talks: Conversations = {name: [] for name in names}
        is_terminal = sys.stdin.isatty() and options.prompt is None
        if is_terminal and not as_json:
            print(f"{' and '.join(names)}; {HELP}")
        questions = iter([options.prompt]) if options.prompt is not None else _questions(is_terminal)
        for question in questions:
            match question.strip():
                case "":
                    continue
                case "/quit" | "/exit":
                    break
                case "/help":
                    print(HELP, file=sys.stderr, flush=True)
                    continue
                case "/reset":
                    for messages in talks.values():
                        messages.clear()
                    continue
            _answer(client, talks, question, options.settings, as_json=as_json)
    return EXIT_DONE


def _find_models(options: ChatOptions, stack: ExitStack) -> tuple[str, str | None, list[str]]:
    """The API's address and key, and the names to talk to."""
    if options.base_url is not None:
        return _attach(options)
    from orbit_runtime.api.checks import check_can_train
    from orbit_runtime.cli.serve import check_named, fetch_named, to_stderr

    if options.api_key_env is not None:
        raise UsageError("a key is used only with an API", where="--api-key-env", fix="give --base-url as well")
    if options.step is not None and options.source is None:
        raise UsageError("a step belongs to a run", where="--step", fix="name a run folder")
    named = {} if options.adapter is None else {"adapter": options.adapter}
    check_named(options.source, options.model, [*named.values()])
    adapters = {**_adapter_of_step(options.source, options.step), **named}
    check_can_train()
    folder = fetch_named(options.model)
    to_stderr("importing torch")
    from secrets import token_urlsafe

    from orbit_runtime.serve.names import POLICY
    from orbit_runtime.serve.open import ServeRequest, open_models
    from orbit_runtime.serve.requests import ServeLimits
    from orbit_runtime.serve.server import start_serving

    # Whatever sampled in the run, one process answers here.
    asked = ServeRequest(options.source, options.model, folder, adapters, engine="Torch")
    opened = open_models(asked, ServeLimits(), to_stderr)
    stack.callback(opened.close)
    key = token_urlsafe()
    serving = stack.enter_context(closing(start_serving(opened, "127.0.0.1", 0, key)))
    base, *others = [served.name for served in opened.policies.all()]
    chosen = next((name for name in adapters), POLICY if POLICY in others else base)
    if options.compare and chosen == base:
        raise UsageError("there is no adapter to compare with", where="--compare", fix="name one with --adapter")
    return f"{serving.url}/v1", key, [base, chosen] if options.compare else [chosen]


def _adapter_of_step(run: str | None, step: int | None) -> dict[str, str]:
    """Its name and address, if a step is named. Raises UsageError if the run does not keep it."""
    if run is None or step is None:
        return {}
    from orbit_runtime.checkpoints.adapter_folder import saved_steps, split_address
    from orbit_runtime.storage import open_store

    kept = saved_steps(open_store(split_address(run)[0], writable=False), [step], first=True, option="--step")
    return {each.name: each.uri for each in kept}


def _attach(options: ChatOptions) -> tuple[str, str | None, list[str]]:
    assert options.base_url is not None
    if options.source is not None or options.adapter is not None or options.step is not None:
        raise UsageError("an API has its own models", where="--base-url", fix="choose one of them with --model")
    if options.model is None:
        raise UsageError("which model of the API?", where="--model", fix="name it; two with a comma for --compare")
    names = options.model.split(",")
    if len(names) != (2 if options.compare else 1):
        raise UsageError(f"{len(names)} models are named", where="--model", fix="--compare takes two, with a comma")
    if len({*names}) < len(names):
        raise UsageError(f"{names[0]} is named twice", where="--model", fix="name two different ones")
    key = os.environ.get(options.api_key_env) if options.api_key_env else None
    if options.api_key_env and not key:
        raise CredentialsError(f"the environment variable {options.api_key_env} is not set", where="--api-key-env")
    return options.base_url.rstrip("/"), key, names


def _questions(is_terminal: bool) -> Iterator[str]:
    if not is_terminal:
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def _answer(
    client: httpx.Client, talks: Conversations, question: str, settings: Mapping[str, Any], *, as_json: bool
) -> None:
    """Shows each model's answer. Ctrl-C ends the answers where they are."""
    import json
    from secrets import randbelow

    from orbit_runtime.cli.side_by_side import is_wide, show_side_by_side
    from orbit_runtime.observability.logs import build_console, plain_stream

    seed: dict[str, int] = {}
    if len(talks) > 1 and "seed" not in settings:
        # Models that are compared draw by the same.
        seed = {"seed": randbelow(2**31)}
    for messages in talks.values():
        messages.append({"role": "user", "content": question})
    asked = {name: stream_chat(client, name, messages, {**settings, **seed}) for name, messages in talks.items()}
    console = build_console()
    # For a program the answer is data.
    file = sys.stdout if console.is_terminal else plain_stream(sys.stdout)
    note = "".join(f"seed {number}" for number in seed.values())
    if len(talks) > 1 and not as_json and is_wide(console):
        answers = show_side_by_side(console, asked, note)
    else:
        answers = _one_by_one(asked, as_json=as_json, file=file)
        if note and not as_json:
            print(f"[{note}]")
    for name, messages in talks.items():
        # A question that was not asked is not remembered.
        if name in answers:
            messages.append({"role": "assistant", "content": answers[name].text})
        else:
            messages.pop()
    if as_json:
        told = {name: {"text": answer.text, "finish_reason": answer.reason} for name, answer in answers.items()}
        print(json.dumps({"prompt": question, **seed, "answers": told}, ensure_ascii=False), flush=True, file=file)


def _one_by_one(asked: Mapping[str, Pieces], *, as_json: bool, file: TextIO) -> dict[str, ModelAnswer]:
    """Shows the answers one below the other. After Ctrl-C the remaining ones are not requested."""
    from orbit_runtime.cli.side_by_side import INTERRUPTED, ModelAnswer

    answers: dict[str, ModelAnswer] = {}
    for name, pieces in asked.items():
        answer = answers[name] = ModelAnswer()
        if not as_json and len(asked) > 1:
            print(f"[{name}]")
        try:
            for text, ended in pieces:
                answer.text += text
                answer.reason = ended or answer.reason
                if not as_json:
                    print(text, end="", flush=True, file=file)
        except KeyboardInterrupt:
            pieces.close()
            if not as_json:
                print(f" [{INTERRUPTED}]")
            break
        if not as_json:
            print()
    return answers


def stream_chat(
    client: httpx.Client, model: str, messages: Sequence[Mapping[str, str]], settings: Mapping[str, Any]
) -> Pieces:
    """Pieces of the answer, and with the last one why it ended. Who stops reading ends the request."""
    import json

    import httpx

    from orbit_runtime.rollout.streaming import take_events

    body = {"model": model, "messages": list(messages), "stream": True, **settings}
    try:
        with client.stream("POST", "/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                raise _refusal(answer)
            held = bytearray()
            for data in (each for piece in answer.iter_bytes() for each in take_events(held, piece)):
                if data == "[DONE]":
                    continue
                said = json.loads(data)
                if "error" in said:
                    raise EngineDiedError(str(said["error"].get("message")), where=str(client.base_url))
                for choice in said["choices"]:
                    yield choice["delta"].get("content") or "", choice["finish_reason"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise EngineDiedError(
            f"the API did not answer: {error or type(error).__name__}",
            where=str(client.base_url),
            fix="check that it runs there; the address must end in /v1",
        ) from None


def _refusal(answer: httpx.Response) -> Exception:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    kind: Callable[..., Exception] = EngineDiedError
    if answer.status_code in (401, 403):
        kind = CredentialsError
    elif answer.status_code < 500:
        kind = UsageError
    return kind(f"the API answered {answer.status_code}: {message}", where=str(answer.url))
