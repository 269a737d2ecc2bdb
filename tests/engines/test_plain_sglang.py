"""An adapter that Orbit trained is anybody's: SGLang serves it with no code of ours, with the trainer's log-probs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.target import Target
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.parity.liveness import Limits, prove
from orbit_runtime.rollout.sglang_server import ServerSettings, server_arguments
from orbit_runtime.rollout.wire import is_serving
from orbit_runtime.workers.server_process import ServerProcess, free_port
from orbit_runtime.workers.sglang_launch import PYTHON_VARIABLE
from tests.engines.servers import Adder, attach
from tests.engines.test_sglang_faults import canary, policy_scores
from tests.integration.engine_inputs import random_adapter
from tests.integration.tiny_models import TARGETS

ROOT = Path(__file__).parents[2]
STEPS = 3


def train(out: Path) -> Path:
    """A few steps of the quickstart with the torch engine; the folder of its newest adapter."""
    command = [sys.executable, "-c", "import sys; from orbit_runtime.cli.main import main; sys.exit(main())",
               "run", str(ROOT / "examples" / "quickstart.yaml"), "--out", str(out),
               "--set", f"spec.training.steps={STEPS}"]  # fmt: skip
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out / "adapters" / f"policy-v{STEPS}"


def check_attached(adder: Adder, url: str, folder: Path) -> None:
    """Attached without the plug-in: proven by log-probs alone, and another adapter under the name is seen."""
    policy, tokenizer = adder
    engine = attach(adder, url, folder, "Folder")
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


def test_plain_sglang_gives_the_trainers_logprobs(lora_adder: Adder, tmp_path: Path) -> None:
    if not os.environ.get(PYTHON_VARIABLE):
        pytest.fail(f"{PYTHON_VARIABLE} is not set: run `make test-engines`")
    adapter = train(tmp_path / "run")
    canary = json.loads((adapter / "manifest.json").read_text())["facts"]["canary"]
    convert(builtin_folder("tiny-adder", "INT4"), tmp_path / "base", Target("BF16"), show=lambda *_: None)
    port = free_port()
    settings = ServerSettings(
        model=tmp_path / "base", device="cpu", dtype="float32", targets=TARGETS, max_running_requests=8,
        max_sequence_length=256, seed=0, lora_rank=16,
    )  # fmt: skip
    command = [os.environ[PYTHON_VARIABLE], str(Path(__file__).parent / "plain_sglang.py")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ORBIT", "PYTHONPATH"))}
    environment["HF_HUB_OFFLINE"] = "1"
    command += server_arguments(settings, port)
    server = ServerProcess("SGLang", command, environment=environment, log=tmp_path / "log")
    url = f"http://127.0.0.1:{port}"

    def ask(path: str, body: dict) -> dict:
        answer = httpx.post(f"{url}{path}", json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    try:
        server.wait_until(lambda: is_serving(url, seconds=30), seconds=800)
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
        check_attached(lora_adder, url, tmp_path)
    finally:
        server.stop()
