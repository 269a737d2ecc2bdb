"""Runs on a pretended CUDA device: what would mix devices there fails here, and what waits for the device is counted.

Belongs here: the paths that only a GPU takes, whatever they compute. Does not belong here: values (`tests/gpu`).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.ports import free_port
from tests.fakes.pretended_cuda import pretended_environment
from tests.integration.killing import small_manifest
from tests.integration.run_launcher import RunLauncher

pytestmark = pytest.mark.timeout(600)
FORMATS = ("BF16", "INT4", "FP8", "NVFP4", "MXFP4")
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {"type": "LoRA"},
    "OFT": {"type": "OFT"},
    "LoRA shared by experts": {"type": "LoRA", "experts": "SharedOuter"},
    "OFT shared by experts": {"type": "OFT", "experts": "Shared"},
    "LoRA with dropout": {"type": "LoRA", "lora": {"dropout": 0.1}},
    "the whole model": {"type": "Full"},
}
EXPERTS = {"INT4": "tiny-moe-adder", "FP8": "tiny-glm4-moe", "NVFP4": "tiny-qwen3-moe", "MXFP4": "tiny-gpt-oss"}
"""The shipped model with experts in each format."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "GRPO": {"groupSize": 2},
    "GSPO": {"type": "GSPO", "groupSize": 2, "importanceSampling": {"type": "TokenTruncated"}},
    "CISPO": {"type": "CISPO", "groupSize": 2},
    "PPO": {"type": "PPO", "groupSize": 2, "kl": {"coefficient": 0.1}},
    "its own teacher": {"groupSize": 2, "teacher": {"type": "Average", "decay": 0.9, "coefficient": 0.1}},
    "SFT": {"type": "SFT"},
}


def _exists(adapter: str, precision: str, algorithm: str) -> bool:
    if "experts" in ADAPTERS[adapter]:
        return precision in EXPERTS
    return (precision, algorithm) == ("BF16", "SFT") or ADAPTERS[adapter]["type"] != "Full"


CASES = [case for case in itertools.product(ADAPTERS, FORMATS, ALGORITHMS) if _exists(*case)]
SAMPLE = [
    ("LoRA with dropout", "INT4", "its own teacher"),
    ("LoRA shared by experts", "FP8", "GSPO"),
    ("OFT", "MXFP4", "PPO"),
    ("OFT shared by experts", "NVFP4", "CISPO"),
    ("the whole model", "BF16", "SFT"),
    ("LoRA", "BF16", "GRPO"),
]
"""Each value once, in `make test`; the others are `make test-long`'s."""


def manifest(adapter: str, precision: str, algorithm: str, folder: Path, *, steps: int) -> dict[str, Any]:
    """Args: folder: gets the prompts, which are so few because preflight measures each of the first eight."""
    asked = small_manifest(steps=steps)
    spec = asked["spec"]
    model = EXPERTS[precision] if "experts" in ADAPTERS[adapter] else "tiny-adder"
    spec["model"] = {"uri": f"builtin://{model}", "precision": precision}
    spec["adapter"], spec["algorithm"] = ADAPTERS[adapter], ALGORITHMS[algorithm]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n}+34=", "answer": f"{n + 34}"}) + "\n" for n in (12, 47)))
    spec["data"]["prompts"] = [{"uri": str(prompts)}]
    spec["training"] |= {"promptsPerStep": 2, "miniBatchPrompts": 2}
    spec["rollout"]["sampling"] |= {"topK": 5, "topP": 0.9, "temperature": 0.7, "repetitionPenalty": 1.1}
    if "dropout" in str(ADAPTERS[adapter]):
        # Trainer and engine differ by what it leaves out.
        spec["parity"] = {"preflight": "Report"}
    if algorithm == "SFT":
        spec["data"]["prompts"][0]["completionField"] = "answer"
        del spec["environment"], spec["rollout"], spec["training"]["miniBatchPrompts"]
    return asked


REFUSED = {
    "torch.ones(3, device='cuda') + torch.ones(3)": "found cpu and cuda:0",
    "torch.ones(3, device='cuda:0') + torch.ones(3, device='cuda:1')": "found cuda:0 and cuda:1",
    "torch.ones(3, device='cuda').bernoulli_(generator=torch.Generator())": "a 'cuda' generator",
    "torch._fused_adamw_([x], [x], [x], [x], [], [torch.ones(())], lr=1.0, beta1=0.9, beta2=0.9, weight_decay=0.0, "
    "eps=1e-8, amsgrad=False, maximize=False)": "found cpu and cuda:0",
    "torch.ones(3).pin_memory()": "is pinned",
}
WAITS = {
    "x.sum().item()": 1,
    "x.tolist()": 1,
    "x.cpu()": 1,
    "x[x > 1]": 1,
    "x.nonzero()": 1,
    "bool((x > 1).any())": 1,
    "x[[0, 2]]": 1,
    "torch.tensor([1.0], device='cuda')": 1,
    "torch.cuda.synchronize()": 1,
    "x.add_(1) @ x": 0,
    "x.to('cuda:1')": 0,
    "torch.zeros(3, device='cuda')[1:]": 0,
}
"""Expression → how often it waits; `x` lies on the device."""
TOLD = """
import json, torch
from tests.fakes.pretended_cuda.device import waits
x = torch.arange(4.0, device="cuda")
refused, counted = {}, {}
for each in REFUSED:
    try:
        eval(each)
    except RuntimeError as error:
        refused[each] = str(error)
for each in WAITS:
    waits.clear()
    eval(each)
    counted[each] = waits.total()
draws = [torch.rand(3, generator=torch.Generator("cuda:1").manual_seed(1), device="cuda:1").tolist() for _ in range(2)]
moved = x.to("cuda:1")
print(json.dumps([refused, counted, draws, moved.tolist(), x.tolist(), str(moved.device)]))
"""


def told_by(program: str, scratch: Path, *arguments: Path) -> Any:
    """What a program prints on two pretended devices."""
    environment = {**os.environ, **pretended_environment(scratch, cards=2)}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_pretended_device_refuses_and_waits_as_a_device_does(tmp_path: Path) -> None:
    program = TOLD.replace("REFUSED", repr(list(REFUSED))).replace("WAITS", repr(list(WAITS)))
    refused, counted, draws, moved, values, device = told_by(program, tmp_path)
    assert [each for each, words in REFUSED.items() if words not in refused.get(each, "")] == []
    assert counted == WAITS
    assert draws[0] == draws[1]
    assert (moved, device) == (values, "cuda:1")


TWO_CARDS = """
import json, torch
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import load_policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.types import Request, Sampling
from tests.integration.engine_inputs import random_adapter
folder, tokens, found = builtin_folder("tiny-adder", "INT4"), [3, 27, 26, 20, 27, 25, 38, 1, 4, 30], []
for kind in ("LoRA", "OFT"):
    config = AdapterConfig(type=kind, targets=("q_proj", "down_proj"))
    trainer, sampler = (load_policy(folder, config, device=f"cuda:{card}") for card in range(2))
    published = random_adapter(trainer, 1)
    engine = TorchEngine(sampler, ChatTokenizer(folder), max_running_requests=4)
    engine.load_adapter("policy-v1", published)
    engine.submit([Request(0, 0, tuple(tokens[:4]), Sampling(max_new_tokens=4), "policy-v1")])
    done = []
    while not done:
        done = list(engine.advance())
    scored = engine.score(tokens, ["policy-v1"])[0].logprobs_T[1:]
    found.append([engine.adapter_digest("policy-v1") == published.digest, scored, str(engine.device)])
    engine.close()
print(json.dumps(found))
"""


def test_an_adapter_of_a_trainer_on_one_card_is_held_by_an_engine_on_another(tmp_path: Path) -> None:
    for holds, scored, device in told_by(TWO_CARDS, tmp_path):
        assert (holds, device) == (True, "cuda:1")
        assert len(scored) == 9
        assert all(logprob < 0 for logprob in scored)


RANKS = """
import json, sys
from pathlib import Path
from orbit_runtime.training.megatron.groups import GroupSizes
from orbit_runtime.training.megatron.rank import PolicySettings, RankSettings
from orbit_runtime.training.megatron.trainer import MegatronTrainer
from tests.megatron.ranks import world
from tests.megatron.test_trainer import CASES, TRAINING, adapter_of, folder_of, hold_state, step
from tests.megatron.trainers import WorldRanks, device_of
folder, adapter = folder_of(Path(sys.argv[1]), CASES[0]), adapter_of(CASES[0])
with world(GroupSizes(2, expert=2)) as ranks:
    settings = RankSettings(folder, adapter, ranks.sizes, TRAINING, PolicySettings(device="cuda"))
    trainer = MegatronTrainer(WorldRanks(ranks, settings), TRAINING.base_model)
    step(trainer, 0)
    state = hold_state(trainer)
    step(trainer, 1)
    once = hold_state(trainer)
    trainer.load_state(state)
    step(trainer, 1)
    print(json.dumps([hold_state(trainer) == once, *ranks.call(device_of)]))
"""


def test_ranks_train_and_go_on_from_their_state_on_a_device(tmp_path: Path) -> None:
    assert told_by(RANKS, tmp_path, tmp_path) == [True, "cuda", "cuda"]


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunLauncher]:
    launcher = RunLauncher(pretended_environment(tmp_path_factory.mktemp("device")))
    yield launcher
    launcher.close()


def report_of(out: Path) -> dict[str, Any]:
    """The report of a run on the device, every publish of which was proven."""
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    assert json.loads((out / "run.json").read_text())["device"] == "cuda"
    assert report["publishes"] == report["publishes_proven"]
    assert bool(report["publishes"]) == (out / "rollouts").exists()
    if not (out / "models").exists():
        assert report["base_digest_before"] == report["base_digest_after"]
    return report


@pytest.mark.parametrize(
    ("adapter", "precision", "algorithm"),
    [case if case in SAMPLE else pytest.param(*case, marks=pytest.mark.long) for case in CASES],
)
def test_a_run_that_is_killed_on_a_device_goes_on_there_to_its_end(
    device: RunLauncher, adapter: str, precision: str, algorithm: str, tmp_path: Path
) -> None:
    asked, out = manifest(adapter, precision, algorithm, tmp_path, steps=2), tmp_path / "run"
    killed = device.start(asked, str(out))
    while Path(f"/proc/{killed}").exists() and not list(out.glob("checkpoints/*/manifest.json")):
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.kill(killed, signal.SIGKILL)
    assert device.wait() == -signal.SIGKILL
    assert device.run(asked, str(out)) == 0
    report = report_of(out)
    assert (report["steps"], report["resumed"]) == (2, 1)


APART = """
import json, sys
from pathlib import Path
from tests.integration.test_pretended_device import manifest
from tests.integration.three_processes import run_apart, two_sides
folder = Path(sys.argv[1])
asked = manifest("OFT", "INT4", "PPO", folder, steps=1)
with two_sides(asked) as sides:
    print(json.dumps(run_apart(asked, folder / "run", sides).ended))
"""


def test_a_trainer_and_an_engine_that_are_apart_run_on_a_device(tmp_path: Path) -> None:
    assert told_by(APART, tmp_path, tmp_path) == "done"
    assert report_of(tmp_path / "run")["steps"] == 1


@pytest.fixture(scope="module")
def trained(device: RunLauncher, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, list[str]]:
    """A run of one step, its folder, and each wait for the device, by the function that waits."""
    folder = tmp_path_factory.mktemp("trained")
    asked = manifest("OFT", "INT4", "GRPO", folder, steps=1)
    assert device.run(asked, str(folder / "run"), {"PRETENDED_WAITS": str(folder / "waits")}) == 0
    report_of(folder / "run")
    return asked, folder / "run", (folder / "waits").read_text().splitlines()


def rollouts_and_update(waits: list[str]) -> tuple[list[str], list[str]]:
    """The waits of a run's only step: since its only prefill, without the one copy of the
    reference's log-probs, and since the first sums of its loss."""
    sums = [number for number, place in enumerate(waits) if place == "training/updater.py as_floats"]
    prefills = [number for number, place in enumerate(waits[: sums[0]]) if place == "rollout/cache.py write_prompts"]
    rollouts = [place for place in waits[prefills[-1] : sums[0]] if place != "training/updater.py column"]
    return rollouts, waits[sums[0] : sums[-1] + 1]


def test_the_host_waits_for_the_device_once_for_each_token_of_all_rows_and_four_times_for_an_update(
    trained: tuple[dict[str, Any], Path, list[str]],
) -> None:
    rollouts, update = rollouts_and_update(trained[2])
    assert rollouts == ["rollout/cache.py write_prompts", *["rollout/rows.py record"] * (len(rollouts) - 1)]
    assert len(rollouts) > 2
    # Sums of the loss, the gradient's norm, how far OFT's series is from a rotation, parity.
    assert update == [
        "training/updater.py as_floats",
        "training/updater.py _apply_gradient",
        "adapters/oft.py series_error",
        "training/updater.py as_floats",
    ]


@pytest.mark.parametrize(("error", "status"), [("OutOfMemoryError", 79), ("AcceleratorError", 80)])
def test_a_device_that_fails_while_it_samples_ends_the_run_with_its_own_status(
    device: RunLauncher, trained: tuple[dict[str, Any], Path, list[str]], error: str, status: int, tmp_path: Path
) -> None:
    """And not with a gate's, for the requests that were under way then."""
    asked, _, waits = trained
    before_update = waits[: waits.index("training/updater.py as_floats")]
    last = f"rollout/rows.py record {before_update.count('rollout/rows.py record')}"
    assert device.run(asked, str(tmp_path / "run"), {"PRETENDED_FAULT": json.dumps({last: error})}) == status


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "{run}", "--out", "{out}", "--set", "evaluation.limit=2"),
        ("merge", "{run}/adapters/policy-v1", "--base", "builtin://tiny-adder", "--out", "{out}"),
        ("convert", "builtin://tiny-adder", "{out}", "--precision", "FP8"),
    ],
    ids=lambda command: str(command[0]),
)
def test_commands_read_on_a_device_what_was_trained_there(
    device: RunLauncher, trained: tuple[dict[str, Any], Path, list[str]], command: tuple[str, ...], tmp_path: Path
) -> None:
    pid = device.command(*(each.format(run=trained[1], out=tmp_path / "out") for each in command))
    while (code := device.ended(pid)) is None:
        time.sleep(0.05)
    assert code == 0
    assert list((tmp_path / "out").iterdir())


def test_base_and_adapter_are_served_from_a_device_with_one_wait_for_each_token(
    device: RunLauncher, trained: tuple[dict[str, Any], Path, list[str]], tmp_path: Path
) -> None:
    address, waits = f"127.0.0.1:{free_port()}", tmp_path / "waits"
    pid = device.command("serve", str(trained[1]), "--listen", address, environment={"PRETENDED_WAITS": str(waits)})
    answers: dict[str, Any] = {}
    while device.ended(pid) is None and len(answers) < 2:
        with suppress(httpx.ConnectError):
            for name in ("tiny-adder", "policy"):
                before = waits.read_text().count("record") if waits.exists() else 0
                asked = {"model": name, "messages": [{"role": "user", "content": "12+34="}], "max_tokens": 4}
                answer = httpx.post(f"http://{address}/v1/chat/completions", json=asked, timeout=60)
                answers[name] = answer.json()["usage"]["completion_tokens"], waits.read_text().count("record") - before
        time.sleep(0.05)
    os.kill(pid, signal.SIGTERM)
    while (code := device.ended(pid)) is None:
        time.sleep(0.05)
    assert code == 0
    assert [tokens == waited > 1 for tokens, waited in answers.values()] == [True, True]
