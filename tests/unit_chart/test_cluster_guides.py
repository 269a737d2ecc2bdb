"""The cluster's guides: their commands are shell, their manifest is good, their tables leave nothing out.

Commands run on a cluster in tests/cluster; here it is only checked what needs none.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
from cluster.guide import find_inline, read_blocks
from ruamel.yaml import YAML

from orbit_operator.policies.failure import EXIT_CODES, WAITING
from orbit_runtime.spec import load_manifest

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs/guides/cluster").glob("*.md"))
OPERATIONS = (ROOT / "docs/guides/cluster/operations.md").read_text()
ROWS = {
    word for line in OPERATIONS.splitlines() if line.startswith("| ") for word in line.split("|")[1].strip().split(", ")
}
NOT_RUN = {
    ("install", "make images-push REGISTRY=…"): "there is no registry; images are imported into the nodes",
    ("operations", "kubectl logs --previous"): "a mention, not a whole command",
}
REASON = re.compile(r"[A-Z][A-Za-z]{3,}")


def blocks(guide: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", guide.read_text(), re.DOTALL)


def reasons() -> set[str]:
    """Every reason that the operator's code gives: `reason="…"`, and second in a (phase, reason, …) or verdict."""
    found = {reason for reason, _, _ in EXIT_CODES.values()} | {reason for reason, _ in WAITING.values()}
    for file in (ROOT / "operator/orbit_operator").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "reason" and isinstance(node.value, ast.Constant):
                found.add(node.value.value)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Verdict":
                found |= {each.value for each in node.args[1:2] if isinstance(each, ast.Constant)}
    return {reason for reason in found if isinstance(reason, str) and REASON.fullmatch(reason)}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_commands_are_valid_shell(guide: Path) -> None:
    for text in blocks(guide, "sh"):
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_manifests_of_the_guide_are_good(tmp_path: Path) -> None:
    found = [block for block in blocks(ROOT / "docs/guides/cluster/run.md", "yaml") if "kind: OrbitRun" in block]
    names = []
    for text in found:
        (tmp_path / "run.yaml").write_text(text)
        run = load_manifest(tmp_path / "run.yaml")
        names.append(run.metadata.name)
        assert run.spec.storage.credentials_secret_name == "orbit-store"
    assert names == ["quickstart", "ranks"]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_values_that_a_guide_names_exist(guide: Path) -> None:
    values = YAML(typ="safe").load(ROOT / "charts/orbit/values.yaml")
    text = guide.read_text()
    named = re.findall(r"--set '?([\w.]+)=", text) + re.findall(
        r"`((?:runs|operator|monitoring|networkPolicy|rbac|crds)\.[\w.]+)(?:=\w+)?`", text
    )
    for path in named:
        node = values
        for part in path.split("."):
            assert part in node, f"{guide.name}: {path}"
            node = node[part]


def test_every_alert_has_a_row() -> None:
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "charts/orbit/files/alerts.yaml").read_text())
    assert set(alerts) - ROWS == set()
    assert len(alerts) == 14


def test_every_exit_code_has_a_row() -> None:
    listed = {
        int(code)
        for line in OPERATIONS.splitlines()
        if line.startswith("| ") and line.count("|") == 6
        for code in re.findall(r"\b\d+\b", line.split("|")[2])
    }
    assert set(EXIT_CODES) | {0, 75} == listed


def test_every_reason_has_a_row() -> None:
    assert len(reasons()) > 30
    assert reasons() - ROWS == set()


def test_every_condition_has_a_row() -> None:
    from orbit_operator.status import CONDITIONS

    assert set(CONDITIONS) - ROWS == set()


def followed(*methods: str) -> set[tuple[object, ...]]:
    """Constant arguments of calls such as `shell.follow("run", "Delete")` in the cluster's tests."""
    calls: set[tuple[object, ...]] = set()
    for file in (ROOT / "tests/cluster").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
                calls.add(tuple(each.value for each in node.args if isinstance(each, ast.Constant)))
    return calls


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_every_block_of_commands_is_run_on_the_cluster(guide: Path) -> None:
    run = {(*call, 0)[:3] for call in followed("follow", "meanwhile")}
    wanted = {(guide.stem, block.section, block.number) for block in read_blocks(guide.stem) if block.language == "sh"}
    assert wanted - run == set()
    assert len(wanted) > 1


def test_every_command_in_running_text_is_run_on_the_cluster() -> None:
    run = followed("say")
    instructions = {
        (guide.stem, command)
        for guide in GUIDES
        for command in find_inline(guide.stem)
        if re.search(r" -|=|[A-Z]{2}| delete ", command) and (guide.stem, command) not in NOT_RUN
    }
    assert instructions - run == set()
    assert len(instructions) > 5


def test_links_between_guides_lead_somewhere() -> None:
    for guide in [*GUIDES, ROOT / "charts/orbit/README.md", ROOT / "docs/README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", guide.read_text()):
            assert (guide.parent / target).exists(), f"{guide.name}: {target}"
