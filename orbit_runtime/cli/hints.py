"""Hints for new users of the command line: examples below each help, and the right command for a wrong word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from orbit_runtime.errors import UsageError

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "run": ("run.yaml", "run.yaml --out s3://bucket/runs/a --set spec.training.steps=200"),
    "rl": ("run.yaml --out runs/a",),
    "trainer": ("run.yaml --listen 0.0.0.0:8101 --token-file token.txt",),
    "inference": ("run.yaml --listen 0.0.0.0:8102 --token-file token.txt",),
    "orchestrator": ("run.yaml --trainer http://a:8101 --inference http://b:8102 --token-file token.txt",),
    "sft": ("sft.yaml --out runs/demonstrated",),
    "validate": ("run.yaml", "run.yaml --set spec.training.learningRate=1e-4"),
    "plan": ("run.yaml", "run.yaml --gpu H100 --set spec.placement.gpus=8"),
    "try": ("run.yaml", "run.yaml --json --set spec.training.learningRate=1e-3"),
    "init": ("run.yaml", "run.yaml --model models/smollm2", "every-field.yaml --full"),
    "inspect": ("hf://Qwen/Qwen3-0.6B", "runs/a/adapters/policy-v60"),
    "convert": ("models/qwen3 models/qwen3-int4 --precision INT4",),
    "merge": (
        "runs/a/adapters/policy-v60 --base models/qwen3-int4 --out models/qwen3-sums",
        "runs/a/adapters/policy-v60 runs/b/adapters/policy-v60 --out adapters/both --weight 0.5 --weight 0.5",
    ),
    "parity": ("run.yaml", "run.yaml --layers --set spec.rollout.engine=SGLang"),
    "serve": ("runs/a", "--model models/qwen3-int4 --adapter sums=runs/a --adapter early=runs/b"),
    "chat": ("runs/a --compare", "--base-url http://127.0.0.1:8000/v1 --model policy --prompt '12+34='"),
    "replay": ("runs/a --steps 3",),
    "eval": (
        "runs/a --steps 20,60",
        "run.yaml --weights-dir runs/a --out asked-a --set spec.evaluation.limit=100",
        "run.yaml --base-url http://127.0.0.1:8000/v1 --model policy --out asked-api",
    ),
    "report": ("runs/a", "runs/a runs/b --html comparison.html"),
    "ls": ("", "s3://bucket/runs"),
    "doctor": ("", "--store s3://bucket/runs"),
    "data prepare": (
        "questions.csv prompts.jsonl --prompt Question --answer Answer",
        "hf://datasets/openai/gsm8k@main/main/train-00000-of-00001.parquet gsm8k.jsonl --format gsm8k",
    ),
}
"""Command → what may follow it. The first is the plainest."""

MEANT = {
    "train": "run", "start": "run", "resume": "run", "continue": "run", "finetune": "sft", "fine-tune": "sft",
    "check": "validate", "lint": "validate", "new": "init", "create": "init", "estimate": "plan",
    "evaluate": "eval", "test": "eval", "compare": "report", "list": "ls", "runs": "ls", "export": "merge",
    "quantize": "convert", "quantise": "convert", "show": "inspect", "generate": "chat", "talk": "chat",
    "prepare": "data prepare", "version": "--version", "help": "--help",
}  # fmt: skip
"""A word that other tools have → ours."""


def add_examples(app: typer.Typer, before: str = "") -> None:
    """Puts the examples of each command below its help, and names its arguments plainly."""
    for info in app.registered_commands:
        info.cls = Command
        name = before + (info.name or info.callback.__name__ if info.callback else "")
        lines = [f"  orbit {name} {follows}".rstrip() for follows in EXAMPLES.get(name, ())]
        if lines:
            # A line of \b keeps the lines as they are.
            info.epilog = "\n".join(["\b", "Examples:", *lines])
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_examples(group.typer_instance, f"{before}{group.typer_instance.info.name} ")


class Command(TyperCommand):
    """An argument is shown by its name alone: typer would add a Python type, such as `<list[str]>`."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for each in self.params:
            if each.param_type_name == "argument":
                each.display_type_rich = lambda ctx: None  # type: ignore[method-assign]


def _command_of(arguments: Sequence[str]) -> str:
    """The command that was called, which the parser does not always name, such as at an option without its value."""
    words = [each for each in arguments if not each.startswith("-")]
    found = [" ".join(words[:count]) for count in (2, 1) if " ".join(words[:count]) in EXAMPLES]
    return f"orbit {found[0]}" if found else "orbit"


def usage_error(error: Any, arguments: Sequence[str]) -> UsageError:
    """Converts the parser's exception: names the command and where to read on."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else _command_of(arguments)
    message = error.format_message().rstrip(".")
    word = message.removeprefix("No such command '").partition("'")[0] if message.startswith("No such command") else ""
    if word in MEANT and path == "orbit":
        return UsageError(f"there is no command '{word}'", where=path, fix=f"`orbit {MEANT[word]}` does this")
    return UsageError(message, where=path, fix=f"see `{path} --help`")
