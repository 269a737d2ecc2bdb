"""An adapter that Orbit trained is anybody's: SGLang serves it with no code of ours, with the trainer's log-probs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from orbit_runtime.parity.liveness import Limits, prove
from tests.engines.proof_matrix import FAULTS, SCALES, Bench, canary_of
from tests.engines.servers import Adder, attach, plain_servers
from tests.engines.test_sglang_faults import canary, policy_scores
from tests.integration.engine_inputs import random_adapter

ROOT = Path(__file__).parents[2]
STEPS = 3


def train(out: Path, *overrides: str, steps: int = STEPS) -> Path:
    """A few steps of the quickstart with the torch engine; the folder of its newest adapter."""
    command = [sys.executable, "-c", "import sys; from orbit_runtime.cli.main import main; sys.exit(main())",
               "run", str(ROOT / "examples" / "quickstart.yaml"), "--out", str(out)]  # fmt: skip
    for override in (f"spec.training.steps={steps}", *overrides):
        command += ["--set", override]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out / "adapters" / f"policy-v{steps}"


def check_attached(adder: Adder, url: str, folder: Path) -> None:
    """Attached without the plug-in: proven by log-probs alone, and another adapter under the name is seen."""
    policy, tokenizer = adder
    engine = attach(adder, [url], folder, "Folder")
    (copy,) = engine.copies()
    assert not copy.reads_back
    previous = None
    for version in (1, 2):
        name, adapter = f"policy-v{version}", random_adapter(policy, version)
        engine.load_adapter(name, adapter)
        proof, previous = prove(
            adapter, name, copy, policy_scores(policy, adapter, canary(tokenizer)), canary(tokenizer),
            limits=Limits(1e-3, 0.02), previous=previous,
        )  # fmt: skip
        assert proof.failures == ()
        assert proof.slot_digest is None
        assert version == 1 or proof.cached_error is not None
    other = random_adapter(policy, 3)
    proof, _ = prove(
        other, "policy-v2", copy, policy_scores(policy, other, canary(tokenizer)), canary(tokenizer),
        limits=Limits(1e-3), previous=None,
    )  # fmt: skip
    assert "effect on the canary differs" in proof.failures[0]
    engine.close()


@dataclass(frozen=True)
class Plain:
    """A server without our plug-in, the file of code that runs inside it, and an adapter that a run trained."""

    url: str
    pid: int
    code: Path
    adapter: Path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    folder = tmp_path_factory.mktemp("plain")
    adapter, code = train(folder / "run"), folder / "code.py"
    with plain_servers(folder, 1, code=code, context=1024) as ((url, server),):
        yield Plain(url, server.pid, code, adapter)


def test_plain_sglang_gives_the_trainers_logprobs(plain: Plain, lora_adder: Adder, tmp_path: Path) -> None:
    check_logprobs(plain.url, plain.adapter)
    check_attached(lora_adder, plain.url, tmp_path)


def test_its_base_teaches_as_the_runs_own_base_does(plain: Plain, tmp_path: Path) -> None:
    """As a teacher behind an endpoint it says of a policy's tokens what the run's base says of them, and as likeliest
    tokens it names those of the run's base."""
    url, adapter, folder = plain.url, plain.adapter, tmp_path
    served = f"type: Served, endpoints: [{{url: '{url}'}}], preflight: Report"
    teachers = {
        "served": f"{{{served}, over: Sampled}}",
        "own": "{type: Base, over: Sampled}",
        "served top": f"{{{served}, over: TopK, topK: 8}}",
        "own top": "{type: Base, over: TopK, topK: 8}",
    }
    seen = {}
    for name, teacher in teachers.items():
        train(
            folder / name,
            f"spec.algorithm={{type: Distillation, groupSize: 4, teacher: {teacher}}}",
            f"spec.adapter.initFrom={adapter}",
            steps=1,
        )
        (line,) = (folder / name / "metrics.jsonl").read_text().splitlines()
        seen[name] = json.loads(line)
    assert seen["served"]["reward_mean"] == seen["own"]["reward_mean"], "the same rollouts"
    assert seen["own"]["teacher_divergence"] > 1e-4
    assert seen["served"]["teacher_divergence"] == pytest.approx(seen["own"]["teacher_divergence"], rel=0.01)
    assert seen["served top"]["reward_mean"] == seen["own"]["reward_mean"]
    assert seen["own top"]["teacher_divergence"] > 1e-4
    assert seen["served top"]["teacher_divergence"] == pytest.approx(seen["own top"]["teacher_divergence"], rel=0.01)
    measured = json.loads((folder / "served" / "teacher.json").read_text())
    assert measured["prompts"] == 64
    assert measured["teacher_reward"] > 0, "the server answered prompts"


def check_logprobs(url: str, adapter: Path) -> None:
    canary = json.loads((adapter / "manifest.json").read_text())["facts"]["canary"]

    def ask(path: str, body: dict) -> dict:
        answer = httpx.post(f"{url}{path}", json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    state = httpx.get(f"{url}/server_info", timeout=60, trust_env=False).json()
    assert "orbit" not in state["internal_states"][0]
    assert ask("/load_lora_adapter", {"lora_name": "mine", "lora_path": str(adapter)})["success"]
    for name, kind in (("mine", "logprobs"), (None, "base_logprobs")):
        body = {
            "input_ids": canary["token_ids"], "lora_path": name, "return_logprob": True, "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        }  # fmt: skip
        entries = ask("/generate", body)["meta_info"]["input_token_logprobs"][1:]
        assert [entry[0] for entry in entries] == pytest.approx(canary[kind][1:], abs=5e-5)
    moved = [abs(a - b) for a, b in zip(canary["logprobs"], canary["base_logprobs"], strict=True)]
    assert max(moved) > 0.01


def test_as_noisy_as_bf16_on_a_gpu(plain: Plain, lora_adder: Adder, tmp_path: Path) -> None:
    """What samples from another adapter is never believed, what is right never accused."""
    engine = attach(lora_adder, [plain.url], tmp_path / "noisy", "Folder")
    bench = Bench("LoRA", lora_adder, engine, [plain.pid], plain.code, tmp_path, canary_of(lora_adder, 512))
    bench.set_noise(0.03)
    for name in ("stale version", "slot never switched", "scale doubled"):
        for scale in SCALES:
            assert bench.try_fault(FAULTS["LoRA"][name], scale) in ("caught", "unproven"), (name, scale)
    assert bench.publish_healthy(12, 0.01)["whole"] > 0
    engine.close()
