"""The same run twice on the device gives the same bits, and no pass adds in an order that nobody fixed.

Does not belong here: runs that are killed, machines that are busy (`tools.same_bits`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.loop import run as train
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.policy import load_policy
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import open_store
from orbit_runtime.training import TorchTrainer
from tests.integration.killing import DEMANDING, adapter_digests, demanding_manifest
from tests.integration.test_torch_trainer import SETTINGS, samples_of
from tests.integration.tiny_families import make_family
from tests.models.determinism import RepeatedSums
from tests.models.family_matrix import Case, adapter_of
from tools.gpu_proof.record import Record, WrongResult

CASES = (
    Case("qwen3", "INT4", "LoRA", "None"),
    Case("qwen3", "NVFP4", "OFT", "None"),
    Case("qwen3_moe", "INT4", "LoRA", "SharedOuter"),
    Case("qwen3_moe", "MXFP4", "OFT", "SharedOuter"),
    Case("deepseek_v3", "FP8", "LoRA", "PerExpert"),
)
RUNS, STEPS = 3, 4


def run(record: Record) -> None:
    device = record.device
    wrong = []
    for case in CASES[:2] if record.is_tiny else CASES:
        found = passes(case, device)
        record.add(f"an update of {case}", found)
        if found["adds twice to one place"] or found["torch refuses"] or found["different adapters"] != 1:
            wrong.append(f"an update of {case}")
    for name in list(DEMANDING)[: 1 if record.is_tiny else None]:
        digests = [whole_run(name, 1 if record.is_tiny else STEPS) for _ in range(2 if record.is_tiny else RUNS)]
        equal = len({*map(tuple, digests)}) == 1
        record.add(f"runs of {name}", {"runs": len(digests), "steps": len(digests[0]), "same bits": equal})
        wrong += [] if equal else [f"runs of {name}"]
    if wrong:
        raise WrongResult(f"not the same bits, or nobody fixes their order: {', '.join(wrong)}")


def passes(case: Case, device: str) -> dict[str, object]:
    """One update three times: alone, watched, and with what torch knows to be without an order refused."""
    with tempfile.TemporaryDirectory() as folder:
        packed, _ = make_family(Path(folder), case.family, case.layout)

        def update() -> str:
            dtype = torch.bfloat16 if device == "cuda" else torch.float32
            policy = load_policy(packed, adapter_of(case), device=device, compute_dtype=dtype)
            trainer = TorchTrainer(policy, SETTINGS)
            trainer.update(samples_of(1, groups=3, size=4))
            return publishable(trainer, 1).digest

        with RepeatedSums() as watch:
            digests = {update()}
        digests.add(update())
        refused = ""
        torch.use_deterministic_algorithms(True)
        try:
            digests.add(update())
        except RuntimeError as error:
            refused = str(error).splitlines()[0]
        finally:
            torch.use_deterministic_algorithms(False)
    return {
        "adds twice to one place": sorted(set(watch.found)),
        "torch refuses": refused,
        "different adapters": len(digests),
    }


def whole_run(name: str, steps: int) -> list[str]:
    """Digest of the adapter after each step."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "run")
        spec = OrbitRun.model_validate(demanding_manifest(name, steps=steps))
        train(spec, out=out, progress=SilentProgress())
        return adapter_digests(open_store(out))
