"""Distillation from a manifest: what the student learns from an adapter, and every teacher that a run refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from orbit_runtime.adapters.state import parse_tensors
from orbit_runtime.adapters.tensorfile import dump
from orbit_runtime.errors import GateError, ModelError, OrbitError, OutputError, UnsupportedError
from orbit_runtime.loop.replay import replay
from orbit_runtime.loop.run import RunResult, run
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.planner.support.combinations import Combination, find_support
from orbit_runtime.sides.machine import machine_facts
from orbit_runtime.sides.trainers import decide_division
from orbit_runtime.spec import OrbitRun, load_manifest, resolve
from orbit_runtime.storage import open_store
from tests.integration.killing import adapter_digests, small_manifest

FILE = "adapter_model.safetensors"
EXAMPLE = Path(__file__).parents[2] / "examples/distillation.yaml"
pytestmark = pytest.mark.timeout(600)  # whole runs, on machines that may be busy


def manifest(steps: int, prompts: int, **algorithm: Any) -> dict[str, Any]:
    made = small_manifest(steps=steps)
    made["spec"]["adapter"] = {"type": "LoRA", "lora": {"rank": 4, "alpha": 8}}
    made["spec"]["algorithm"] = algorithm
    made["spec"]["training"] |= {"promptsPerStep": prompts, "miniBatchPrompts": prompts, "learningRate": 4e-3}
    made["spec"]["checkpoint"] = {"everySteps": 5}
    return made


def student(teacher: str, steps: int = 2, prompts: int = 8, **fields: Any) -> dict[str, Any]:
    fields = {"type": "Adapter", "uri": teacher, **fields}
    return manifest(steps, prompts, type="Distillation", groupSize=1, teacher=fields)


def start(spec: dict[str, Any], out: Path) -> RunResult:
    return run(OrbitRun.model_validate(spec), out=str(out))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 8, trained by rewards."""
    out = tmp_path_factory.mktemp("teacher") / "run"
    asked = manifest(10, 32, groupSize=16)
    asked["spec"]["adapter"]["lora"] = {"rank": 8, "alpha": 16}
    start(asked, out)
    return out / "adapters" / "policy-v10"


@pytest.fixture(scope="module")
def taught(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("student") / "run"
    start(student(str(teacher), 12, 64), out)
    return out


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in open_store(str(out)).get("metrics.jsonl").decode().splitlines()]


def test_a_student_learns_from_a_better_adapter_without_a_reward(taught: Path) -> None:
    rows = rows_of(taught)
    divergences = [row["teacher_divergence"] for row in rows]
    assert divergences[-1] < divergences[0] / 2
    rewards = [row["reward_mean"] for row in rows]
    assert sum(rewards[-4:]) / 4 > rewards[0]
    measured = json.loads((taught / "teacher.json").read_text())
    assert measured["prompts"] == 64
    assert measured["teacher_reward"] > measured["student_reward"]
    report = json.loads((taught / "report.json").read_text())
    assert report["base_digest_before"] == report["base_digest_after"]
    assert report["publishes"] == report["publishes_proven"]


@pytest.mark.long
def test_the_example_learns_from_what_it_is_told_to(teacher: Path, tmp_path: Path) -> None:
    """`examples/distillation.yaml` as it stands, but for where its teacher lies and how long it runs."""
    changed = [f"spec.algorithm.teacher.uri={teacher}", "spec.training.steps=12"]
    assert run(load_manifest(EXAMPLE, changed), out=str(tmp_path / "run")).ended == "done"
    rows = rows_of(tmp_path / "run")
    assert rows[-1]["teacher_divergence"] < rows[0]["teacher_divergence"] / 2
    assert sum(row["reward_mean"] for row in rows[-4:]) / 4 > rows[0]["reward_mean"]


def test_its_steps_are_replayed_bit_for_bit(taught: Path) -> None:
    found = replay(open_store(str(taught)), steps=3, show=lambda done, of: None)
    assert found.is_equal
    assert [step.replayed for step in found.steps] == adapter_digests(open_store(str(taught)))[:3]


def copied(adapter: Path, to: Path, factor: float) -> Path:
    """A copy as PEFT would leave it: no manifest beside the files."""
    files = {name: (adapter / name).read_bytes() for name in ("adapter_config.json", FILE)}
    to.mkdir()
    tensors = {name: tensor * factor for name, tensor in parse_tensors(files, FILE).items()}
    (to / FILE).write_bytes(dump(tensors, torch.float32))
    (to / "adapter_config.json").write_bytes(files["adapter_config.json"])
    return to


def peft_folder(adapter: Path) -> Path:
    """Files of a run's adapter lie under names of their execution: those that a manifest names."""
    named = json.loads((adapter / "manifest.json").read_text())["parts"]
    out = adapter.parent / f"{adapter.name}-plain"
    if not out.exists():
        out.mkdir()
        for name in named:
            (found,) = adapter.glob(f"*{name}")
            (out / name).write_bytes(found.read_bytes())
    return out


def test_a_teacher_that_changed_is_not_continued_with(teacher: Path, tmp_path: Path) -> None:
    plain = copied(peft_folder(teacher), tmp_path / "a", 1.0)
    out = tmp_path / "run"
    start(student(str(plain), preflightPrompts=8), out)
    moved = copied(peft_folder(teacher), tmp_path / "moved", 1.0)
    longer = student(str(moved), steps=3, preflightPrompts=8)
    assert start(longer, out).ended == "done"
    other = copied(peft_folder(teacher), tmp_path / "other", 1.01)
    with pytest.raises(OutputError, match=r"content\.teacher"):
        start(student(str(other), steps=4), out)


def test_a_worse_teacher_stops_the_run_or_is_reported(teacher: Path, tmp_path: Path) -> None:
    worse = copied(peft_folder(teacher), tmp_path / "worse", -3.0)
    with pytest.raises(GateError, match=r"on 64 prompts the teacher earns 0\.\d+, the policy") as caught:
        start(student(str(worse)), tmp_path / "refused")
    assert "preflight: Report" in str(caught.value.fix)
    start(student(str(worse), preflight="Report"), tmp_path / "reported")
    warnings = json.loads((tmp_path / "reported" / "report.json").read_text())["warnings"]
    assert any("no better than what it is to teach" in each for each in warnings)


def refused(spec: dict[str, Any], out: Path) -> OrbitError:
    with pytest.raises(OrbitError) as caught:
        start(spec, out)
    assert not (out / "run.json").exists()
    return caught.value


def test_a_teacher_of_another_base_is_refused_before_the_model_is_loaded(teacher: Path, tmp_path: Path) -> None:
    asked = student(str(teacher))
    asked["spec"]["model"]["precision"] = "NVFP4"
    error = refused(asked, tmp_path / "run")
    assert isinstance(error, ModelError)
    assert "trained on another base" in str(error)
    assert error.where == "spec.algorithm.teacher.uri"


def test_a_teacher_that_is_not_there_or_too_wide_is_named(teacher: Path, tmp_path: Path) -> None:
    assert refused(student(str(tmp_path / "nowhere")), tmp_path / "a").exit_code == 66
    narrow = student(str(teacher))
    narrow["spec"]["adapter"]["targets"] = ["q_proj"]
    error = refused(narrow, tmp_path / "b")
    assert error.exit_code == 66
    assert "which this run's adapter does not" in str(error)


@pytest.mark.parametrize("name", ["Base", "Average"])
def test_teachers_without_files_train_beside_a_reward(tmp_path: Path, name: str) -> None:
    asked = manifest(2, 4, groupSize=4, teacher={"type": name, "over": "Sampled", "coefficient": 0.1})
    start(asked, tmp_path / "run")
    assert all("teacher_divergence" in row for row in rows_of(tmp_path / "run"))
    assert not (tmp_path / "run" / "teacher.json").exists()


def test_ranks_learn_from_the_base_by_sampled_tokens_and_from_servers_only() -> None:
    folder = builtin_folder("tiny-adder", "INT4")
    asked = manifest(2, 4, groupSize=4, teacher={"type": "Base", "over": "Sampled"})
    asked["spec"]["training"]["trainer"] = "Megatron"
    decided = decide_division(resolve(OrbitRun.model_validate(asked), machine_facts()), folder)
    assert decided.trainer == "Megatron"
    served = copy.deepcopy(asked)
    served["spec"]["algorithm"]["teacher"] = {"type": "Served", "over": "TopK", "endpoints": [{"url": "http://a"}]}
    assert decide_division(resolve(OrbitRun.model_validate(served), machine_facts()), folder).trainer == "Megatron"
    for fields in ({"type": "Base"}, {"type": "Average", "over": "Sampled"}):
        other = copy.deepcopy(asked)
        other["spec"]["algorithm"]["teacher"] = fields
        with pytest.raises(UnsupportedError, match="neither a second adapter"):
            decide_division(resolve(OrbitRun.model_validate(other), machine_facts()), folder)
    found = find_support(Combination("INT4", "qwen3", "LoRA", "None", "SGLang", "Megatron", 8, teacher=True))
    assert (found.state, found.where) == ("missing", "training.trainer")
