"""`orbit chat` over a server that runs, and over an engine of its own; its input a pipe."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orbit_runtime.cli.chat import ChatOptions, run_chat
from orbit_runtime.cli.main import app
from orbit_runtime.errors import CredentialsError, EngineDiedError, UsageError
from orbit_runtime.serve.open import ServeRequest, open_models
from orbit_runtime.serve.requests import ServeLimits
from orbit_runtime.serve.server import start_serving

TOKEN = "a-token-of-tests"
SETTINGS = {"max_tokens": 4, "temperature": 0.0}


@pytest.fixture(scope="module")
def url(trained: Path) -> Iterator[str]:
    serving = start_serving(
        open_models(ServeRequest(str(trained)), ServeLimits(), lambda _: None), "127.0.0.1", 0, TOKEN
    )
    yield f"{serving.url}/v1"
    serving.close()


def options(url: str | None, *, model: str | None = "policy", **more: object) -> ChatOptions:
    fields = {"source": None, "adapter": None, "step": None, "compare": False, "prompt": None, "settings": SETTINGS}
    return ChatOptions(**{**fields, "model": model, "base_url": url, "api_key_env": "CHAT_KEY", **more})


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAT_KEY", TOKEN)


def answers(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_lines_of_a_pipe_are_one_conversation_until_it_is_reset(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("12+34=\n\n/help\n12+34=\n/reset\n12+34=\n/quit\n1+1=\n"))
    assert run_chat(options(url), as_json=True) == 0
    first, second, third = answers(capsys)
    assert first == third
    assert first["answers"] != second["answers"], "the second was asked after the first"


def test_base_and_adapter_are_both_asked(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = options(url, model="tiny-adder,policy", compare=True, prompt="12+34=")
    run_chat(asked, as_json=True)
    (found,) = answers(capsys)
    assert [*found["answers"]] == ["tiny-adder", "policy"]
    assert 0 <= found["seed"] < 2**31, "both drew by one"
    run_chat(asked, as_json=False)
    shown = capsys.readouterr().out
    for name, answer in found["answers"].items():
        assert f"[{name}]\n{answer['text']}" in shown


def test_an_interrupt_ends_the_answer_and_not_the_program(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(io.StringIO):
        """Ctrl-C while the second piece is written."""

        left = 2

        def write(self, text: str) -> int:
            self.left -= bool(text.strip())
            if not self.left:
                raise KeyboardInterrupt
            return super().write(text)

    with pytest.MonkeyPatch.context() as patched:
        out = Interrupted()
        patched.setattr("sys.stdout", out)
        patched.setattr("sys.stdin", io.StringIO("12+34=\n56+1=\n"))
        settings = {"max_tokens": 60, "temperature": 1.0, "seed": 3, "ignore_eos": True}
        assert run_chat(options(url, settings=settings), as_json=False) == 0
    first, second = out.getvalue().splitlines()
    assert first.endswith("[interrupted]")
    assert "interrupted" not in second
    assert second


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"api_key_env": None}, CredentialsError, "401"),
        ({"api_key_env": "NO_SUCH_KEY"}, CredentialsError, "NO_SUCH_KEY is not set"),
        ({"model": "gpt"}, UsageError, "there are: tiny-adder, policy"),
        ({"model": None}, UsageError, "which model"),
        ({"compare": True}, UsageError, "1 models are named"),
        ({"compare": True, "model": "policy,policy"}, UsageError, "named twice"),
        ({"source": "runs/a"}, UsageError, "its own models"),
        ({"base_url": "http://127.0.0.1:9/v1"}, EngineDiedError, "did not answer"),
        ({"base_url": None}, UsageError, "only with an API"),
        ({"base_url": None, "api_key_env": None, "step": 1}, UsageError, "belongs to a run"),
    ],
)
def test_what_cannot_be_asked_is_one_error(url: str, changed: dict[str, object], kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        run_chat(options(**{"url": url, "prompt": "1+1=", **_named(changed)}), as_json=True)


def _named(changed: dict[str, object]) -> dict[str, object]:
    return {("url" if name == "base_url" else name): value for name, value in changed.items()}


def test_the_guides_commands_run(trained: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/serving.md").read_text()
    section = guide.partition("## Talking to a checkpoint")[2].partition("\n## ")[0]
    own, other = [line for line in section.splitlines() if line.startswith("orbit chat")]
    monkeypatch.setenv("ORBIT_SERVE_TOKEN", TOKEN)
    own = own.replace("runs/quickstart", str(trained)).replace("--step 20", "--step 1")
    done = CliRunner().invoke(app, [*shlex.split(own)[1:], "--max-tokens", "3"], input="12+34=\n/reset\n1+1=\n/quit\n")
    assert done.exit_code == 0, done.output
    assert done.output.count("[tiny-adder]\n") == done.output.count("[step-1]\n") == 2
    done = CliRunner().invoke(app, shlex.split(other.replace("http://127.0.0.1:8000/v1", url))[1:])
    assert done.exit_code == 0, done.output
    assert [*json.loads(done.output)["answers"]] == ["policy"]


def test_a_conversation_with_a_run_begins_without_a_table_of_its_layers(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = options(None, model=None, source=str(trained), api_key_env=None, prompt="12+34=")
    assert run_chat(asked, as_json=True) == 0
    out, told = capsys.readouterr()
    assert "policy" in json.loads(out)["answers"]
    first, second = told.splitlines()
    assert first == "importing torch"
    assert second.startswith("policy: ")
    assert second.endswith(" live")
