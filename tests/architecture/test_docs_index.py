"""The documentation's index: it names every page that a reader may look for, and no page that is not there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def linked(text: str) -> set[Path]:
    """Files that the relative links of an index in `docs` lead to."""
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    return {(DOCS / target).resolve() for target in targets if "://" not in target}


def test_the_index_names_every_guide_and_every_reference_page() -> None:
    pages = {path for folder in ("guides", "python", "reference") for path in (DOCS / folder).rglob("*.md")}
    named = linked((DOCS / "README.md").read_text(encoding="utf-8"))
    assert sorted(str(path.relative_to(DOCS)) for path in pages - named) == []


def test_every_page_that_the_index_names_is_there() -> None:
    assert [str(path) for path in linked((DOCS / "README.md").read_text(encoding="utf-8")) if not path.exists()] == []


def test_the_search_finds_a_link_with_and_without_an_anchor() -> None:
    found = linked("[a](guides/models.md), [b](guides/sglang.md#experts), [c](https://example.com/x.md)")
    assert {path.name for path in found} == {"models.md", "sglang.md"}


def test_decisions_and_the_change_log_can_be_read_to_the_end() -> None:
    words = {path.name: len(path.read_text(encoding="utf-8").split()) for path in (DOCS / "decisions").glob("*.md")}
    assert {name: count for name, count in words.items() if count > 400} == {}
    assert sum(words.values()) <= 9000
    assert (DOCS.parent / "CHANGELOG.md").stat().st_size <= 8192


def test_what_a_contributor_touches_is_there() -> None:
    """Rows of CONTRIBUTING's table: a path begins in the repository's root, or below `orbit_runtime`."""
    root = DOCS.parent
    rows = re.findall(r"^\| an? [^|]*\| (.*) \|$", (root / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {each for row in rows for each in re.findall(r"`([\w.]+/[^`]*)`", row)}
    assert len(rows) > 15 and {"spec/objectives.py", "storage/faults.py"} <= named  # noqa: PT018
    found = [[each for base in (root, root / "orbit_runtime") for each in base.glob(re.sub("<[^>]*>", "*", name))]
             for name in sorted(named)]  # fmt: skip
    assert [name for name, paths in zip(sorted(named), found, strict=True) if not paths] == []


ADDED = {
    "environments/rewards/words.py": (
        "",
        "def words(completion, prompt, fields):\n"
        '    """The number of words."""\n'
        "    return float(len(completion.split()))\n",
    ),
    "environments/rewards/__init__.py": (
        '    "Length": ',
        '    "Words": "orbit_runtime.environments.rewards.words:words",\n    "Length": ',
    ),
    "spec/environment.py": ('"Length", "Code"', '"Length", "Words", "Code"'),
    "spec/objectives.py": (
        'OBJECTIVES: Mapping[AlgorithmType, Objective] = {\n',
        'OBJECTIVES: Mapping[AlgorithmType, Objective] = {\n    "Plain": Objective(name="Plain", paper="", source="", '
        'normalize="None", clip_low=0.1),\n',
    ),
    "model_info/families/__init__.py": ('    "llama": ', '    "lama": grouped.llama,\n    "llama": '),
}  # fmt: skip
"""What CONTRIBUTING's rows say to touch for a reward, an objective and a family: file → text, and what replaces it."""
USES = """
import json, sys
from orbit_runtime.algorithms.advantages import ScoredGroup
from orbit_runtime.algorithms.table import build_algorithm, loss_settings
from orbit_runtime.environments.rewards import REWARDS
from orbit_runtime.model_info.families import describe
from orbit_runtime.spec import OrbitRun
from orbit_runtime.workers.user_code.entrypoints import load_object

run = OrbitRun.model_validate(json.loads(sys.argv[1]))
reward = run.spec.environment.rewards[0]
print(load_object(REWARDS[reward.type])("three more words", (), {}))
print(build_algorithm(run.spec.algorithm).advantages([ScoredGroup([1.0, 0.0], [1, 1], None, None)]))
print(loss_settings(run.spec.algorithm).clip_low)
print(len(describe(json.loads(sys.argv[2])).weights) > 10)
"""
LLAMA = {
    "model_type": "lama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def test_who_follows_the_rows_adds_a_reward_an_objective_and_a_family(tmp_path: Path) -> None:
    rows = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    copy = tmp_path / "orbit_runtime"
    shutil.copytree(DOCS.parent / "orbit_runtime", copy, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    for name, (old, new) in ADDED.items():
        assert any(told in rows for told in (f"`{name}`", f"`{Path(name).parent}/<name>.py`")), f"no row names {name}"
        text = (copy / name).read_text(encoding="utf-8") if old else ""
        assert old in text, name
        (copy / name).write_text(text.replace(old, new, 1) if old else new, encoding="utf-8")
    types = copy / "spec/objectives.py"
    types.write_text(types.read_text(encoding="utf-8").replace('    "GRPO",\n', '    "GRPO",\n    "Plain",\n', 1))
    manifest = {
        "apiVersion": "orbitrl.dev/v1alpha1",
        "kind": "OrbitRun",
        "metadata": {"name": "added"},
        "spec": {
            "model": {"uri": "builtin://tiny-adder"},
            "algorithm": {"type": "Plain"},
            "data": {"prompts": [{"uri": "builtin://two-digit-addition"}]},
            "environment": {"rewards": [{"name": "words", "type": "Words"}]},
            "training": {"steps": 1},
        },
    }
    command = [sys.executable, "-c", USES, json.dumps(manifest), json.dumps(LLAMA)]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True)
    assert done.stdout.split("\n") == ["3.0", "[[0.5, -0.5]]", "0.1", "True", ""], done.stderr
