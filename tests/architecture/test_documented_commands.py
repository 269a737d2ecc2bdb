"""Every command that the pages show: it parses, its settings and files exist, and a named test executes it or a reason
says why none does.

The guides of the cluster are executed by `tests/cluster`; here their `orbit` commands are parsed like the others.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from fakes.guide import ROOT, write_files

from orbit_runtime.cli.main import app, run_command
from orbit_runtime.spec import load_manifest

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/python").glob("*.md")),
         *sorted((ROOT / "docs/guides").glob("*.md"))]  # fmt: skip
CLUSTER_PAGES = sorted((ROOT / "docs/guides/cluster").glob("*.md"))
FIRST_PAGE = "tests/integration/test_first_page.py::test_the_page_gets_from_nothing_to_an_own_reward"
SERVED = "tests/integration/test_serving_guide.py::"
REAL = "tests/real/test_smollm2.py::test_the_example_learns"
WORDS = "tests/real/test_smollm2.py::test_sums_in_words_are_learned_from_demonstrations_and_then_by_reward"
NETWORK = "needs a package index"
GPU = "needs a GPU; each stage runs without one in tests/models/test_gpu_proof.py"

WHERE: Mapping[str, Mapping[str, str]] = {
    "README.md": {
        "make quickstart": f"{NETWORK}; what it runs is run by tests/integration/test_quickstart.py",
        "make test": "these tests",
        ". .venv/bin/activate": "changes the reader's shell",
        "orbit try examples/smollm2.yaml": REAL,
        "orbit run examples/smollm2.yaml": REAL,
        "orbit serve runs/smollm2@best": REAL,
        "orbit validate run.yaml": FIRST_PAGE,
        "orbit try run.yaml": FIRST_PAGE,
        "orbit run run.yaml": FIRST_PAGE,
        "orbit run run.yaml --out s3://": "needs a bucket; tests/store/test_s3_inputs.py runs from one, and into one",
        "orbit report runs/a runs/b": "tests/unit_runtime/observability/test_report.py::test_the_guides_commands_run",
        "orbit doctor": "tests/unit_runtime/cli/test_commands.py::test_the_doctors_verdict_is_its_exit_code",
    },
    "docs/README.md": {
        "make install": NETWORK,
        ". .venv/bin/activate": "changes the reader's shell",
        "mkdir": "makes the reader's folder",
        "cd": "changes the reader's shell",
        "orbit": FIRST_PAGE,
    },
    "docs/guides/data.md": {
        "python save.py": "tests/integration/test_data_guide.py::test_a_run_reads_the_folder_that_datasets_saved",
        "orbit run": "tests/integration/test_data_guide.py::test_a_run_reads_the_folder_that_datasets_saved",
        "orbit data prepare": "tests/integration/test_data_guide.py::"
        "test_the_files_of_the_guide_are_prepared_with_their_commits",
    },
    "docs/guides/environments.md": {"pip install": NETWORK},
    "docs/guides/evaluation.md": {
        "orbit": "tests/integration/test_evaluation_guide.py::test_every_checkpoint_is_measured_on_the_same_prompts",
        "orbit eval quickstart.yaml --base-url": "tests/integration/test_evaluation_guide.py::"
        "test_an_api_is_asked_as_the_guide_says",
    },
    "docs/guides/examples.md": {
        "pip install": NETWORK,
        "orbit run examples/verifiers.yaml": "tests/bridges/test_learning.py::test_an_example_learns",
        "orbit run examples/gymnasium.yaml": "tests/bridges/test_learning.py::test_an_example_learns",
        "orbit run examples/code.yaml": "tests/integration/test_code_example.py::"
        "test_a_policy_learns_to_write_functions_that_pass_their_tests",
    },
    "docs/guides/gpu.md": {"make gpu-wheels": NETWORK, "make gpu-proof": GPU},
    "docs/guides/inputs.md": {
        "": "tests/store/test_inputs_guide.py::test_the_commands_of_the_guide_work",
        "orbit run run.yaml --out runs/s3": "tests/store/test_s3_inputs.py::test_the_commands_of_the_guide_work",
    },
    "docs/guides/precision.md": {"orbit": "tests/integration/test_precision_guide.py::"
                                 "test_every_command_of_the_guide_works"},
    "docs/guides/ranks.md": {
        "orbit run examples/ranks.yaml": "tests/engines/test_ranks_run.py::"
        "test_a_rank_that_is_killed_is_named_nothing_stays_and_one_process_goes_on",
        "orbit plan examples/kimi-k2-6.yaml": "needs the hub, where it reads the headers of the weights; "
        "tests/unit_runtime/planner/test_flagships.py plans it from their sizes",
    },
    "docs/guides/real_model.md": {
        "make real-model": NETWORK,
        "orbit run examples/smollm2.yaml": REAL,
        "orbit run examples/smollm2.yaml --out runs/naive": "tests/real/test_smollm2.py::"
        "test_a_naive_reward_is_satisfied_without_the_task",
        "orbit run examples/smollm2.yaml --out runs/int4": "tests/real/test_smollm2.py::"
        "test_every_format_trains_with_both_adapters",
        "orbit convert": "tests/real/test_smollm2.py::test_every_format_trains_with_both_adapters",
        "orbit sft": WORDS,
        "orbit run examples/smollm2.yaml --out runs/words": WORDS,
    },
    "docs/guides/report.md": {
        "orbit report": "tests/unit_runtime/observability/test_report.py::test_the_guides_commands_run",
    },
    "docs/guides/serving.md": {
        "orbit serve runs/quickstart": f"{SERVED}test_the_guides_client_and_its_change_of_weights",
        "orbit serve --model": "tests/integration/test_serving.py::test_the_command_serves_drains_and_ends_with_0",
        "curl": f"{SERVED}test_the_guides_whole_model_takes_the_bases_place_once_the_adapter_is_put_back",
        "curl -H": f"{SERVED}test_the_guides_client_and_its_change_of_weights",
        "orbit merge": f"{SERVED}test_the_guides_whole_model_takes_the_bases_place_once_the_adapter_is_put_back",
        "orbit chat": "tests/integration/test_chat_command.py::test_the_guides_commands_run",
    },
    "docs/guides/sft.md": {
        "": "tests/integration/test_sft_guide.py::test_each_stage_of_the_guide_is_better_than_the_one_before",
    },
    "docs/guides/sglang.md": {
        "orbit run": "tests/engines/test_sglang_run.py::test_a_killed_server_costs_no_step",
        "orbit run examples/quickstart.yaml --set spec.rollout.engine=SGLang --set spec.adapter={type: OFT}":
        "tests/engines/test_sglang_run.py::"
        "test_a_run_with_oft_that_sleeps_is_proven_at_every_publish_and_at_parity_in_every_step",
        "orbit parity": "tests/engines/test_sglang_layers.py::test_the_command_looks_into_the_servers_layers",
    },
    "docs/guides/three_processes.md": {
        "orbit": "tests/integration/test_three_processes.py::test_the_guides_orchestrator_runs_without_torch",
        "orbit rl": "tests/integration/test_three_processes.py::"
        "test_the_guides_orbit_rl_starts_again_what_dies_and_leaves_nothing_behind",
    },
}  # fmt: skip
"""Page → the beginning of a command → the test that executes it, or the reason why none does. The longest counts."""
PLACEHOLDER = re.compile(r"[<>…]")


@dataclass(frozen=True)
class Command:
    page: Path
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def __str__(self) -> str:
        return f"{name_of(self.page)}: {self.text[:70]}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands_of(page: Path) -> Iterator[Command]:
    for language, block in re.findall(r"```(sh|bash|console|shell)\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        text = re.sub(r"<<'?(\w+)'?(.*?)\n.*?^\1$", r"\2", block.replace("\\\n", " "), flags=re.DOTALL | re.MULTILINE)
        lines = text.splitlines()
        if language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        for line in lines:
            for words in in_order(shlex.split(line.strip().removeprefix("(").removesuffix(")"), comments=True)):
                yield Command(page, words)


def in_order(words: list[str]) -> Iterator[tuple[str, ...]]:
    """The commands of a line, without what is set before a command and where its output goes."""
    found: list[str] = []
    for word in [*words, "&&"]:
        if word in ("&&", ";", "|"):
            while found and re.fullmatch(r"[A-Z_]+=.*", found[0]):
                del found[0]
            if ">" in found:
                del found[found.index(">") :]
            if found:
                yield tuple(found)
            found = []
        else:
            found.append(word)


def mentioned_in(page: Path) -> Iterator[Command]:
    """Commands in the text, `orbit …`."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for found in re.findall(r"(?<!`)`(orbit [a-z][^`]*)`", text):
        yield Command(page, tuple(shlex.split(found)))


SHOWN = [command for page in PAGES for command in commands_of(page)]
ORBIT = [
    command
    for page in [*PAGES, *CLUSTER_PAGES]
    for command in (*commands_of(page), *mentioned_in(page))
    if command.words[0] == "orbit"
]


def leaves(found: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in found.items():
        if hasattr(command, "commands"):
            yield from leaves(command.commands, f"{before}{name} ")
        else:
            yield before + name, command


KNOWN = dict(leaves(typer.main.get_command(app).commands))  # type: ignore[attr-defined]


def split_name(command: Command) -> tuple[str, list[str]]:
    for length in (2, 1):
        name = " ".join(command.words[1 : 1 + length])
        if name in KNOWN:
            return name, [*command.words[1 + length :]]
    raise AssertionError(f"{command}: there is no such command")


@pytest.mark.parametrize("command", ORBIT, ids=str)
def test_a_command_of_the_pages_is_one_with_options_that_exist(command: Command) -> None:
    name, arguments = split_name(command)
    options = {option for each in KNOWN[name].params for option in (*each.opts, *each.secondary_opts)}
    used = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    assert used <= options | {"--help"}, f"{command}: there is no {used - options}"


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has: the examples, the quickstart, and what `orbit init` writes."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copy(ROOT / "examples/quickstart.yaml", folder)
    assert run_command(["init", str(folder / "run.yaml")]) == 0
    return folder


@pytest.mark.parametrize("command", [each for each in SHOWN if each.words[0] == "orbit"], ids=str)
def test_a_shown_command_parses_with_real_settings_of_manifests_that_are_there(
    command: Command, initial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, arguments = split_name(command)
    parsed = KNOWN[name].make_context(name, arguments).params
    shutil.copytree(initial, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    write_files(command.page.read_text("utf-8"), tmp_path)
    manifests = [word for word in arguments if word.endswith(".yaml")]
    if name != "init" and (manifests or parsed.get("overrides")):
        # A run folder's settings are those of its manifest, here the quickstart's.
        load_manifest(manifests[0] if manifests else "quickstart.yaml", parsed.get("overrides") or [])


@pytest.mark.parametrize("command", [each for each in SHOWN if each.words[0] != "orbit"], ids=str)
def test_a_target_a_script_or_an_extra_is_there(command: Command, tmp_path: Path) -> None:
    program, *words = command.words
    if program == "make":
        makefile = (ROOT / "Makefile").read_text("utf-8")
        variables = [word.partition("=")[0] for word in words if "=" in word]
        assert all(f"$({each})" in makefile for each in variables), variables
        for target in set(words) - {word for word in words if "=" in word}:
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    elif program == "pip":
        (extras,) = re.findall(r"orbit-rl\[(.+)\]", words[1])
        assert {*extras.split(",")} <= {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"]}  # fmt: skip
    elif program == "python" and words[0].endswith(".py"):
        write_files(command.page.read_text("utf-8"), tmp_path)
        assert (tmp_path / words[0]).is_file()
    else:
        assert program in ("curl", "cd", "mkdir", ".", "python", "python3"), "say here how it is checked"


def where(command: Command) -> tuple[str, str]:
    """The beginning of the command that the table knows, and the test or reason."""
    table = WHERE.get(name_of(command.page), {})
    known = [begin for begin in table if f"{command.text} ".startswith(f"{begin} " if begin[-1:].isalnum() else begin)]
    assert known, f"{command}: name the test that executes it, or why none can, in WHERE"
    longest = max(known, key=len)
    return longest, table[longest]


@pytest.mark.parametrize("command", SHOWN, ids=str)
def test_a_shown_command_is_executed_by_a_test_or_says_why_it_is_not(command: Command) -> None:
    _, found = where(command)
    if not found.startswith("tests/"):
        print(f"not executed: {command.text}: {found}")
        return
    file, _, test = found.partition("::")
    text = (ROOT / file).read_text("utf-8")
    assert f"def {test}(" in text, found
    manifests = [Path(word).name for word in command.words if word.endswith(".yaml")]
    spoken = [f'"{command.words[1]}"', " ".join(command.words[:2])]
    evidence = [name_of(command.page), command.page.name, *manifests, *spoken]
    assert any(each in text for each in evidence), f"{found} speaks neither of the page nor of the command"


def test_the_table_holds_nothing_that_no_page_shows() -> None:
    used = {(name_of(command.page), where(command)[0]) for command in SHOWN}
    assert {(page, begin) for page, table in WHERE.items() for begin in table} - used == set()


def test_test_modules_that_are_commands_import_as_commands() -> None:
    """Not as pytest does, which finds more: `make test-bisect` and the like are run by people, days apart."""
    named = re.compile(r"-m (tests\.[a-z_.]*[a-z_])")
    places = [ROOT / "Makefile", *(ROOT / "tests").rglob("*.py"), *(ROOT / "tests").rglob("*.md")]
    modules = sorted({name for place in places for name in named.findall(place.read_text(encoding="utf-8"))})
    assert len(modules) > 3
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(modules)}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
