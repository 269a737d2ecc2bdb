"""What a run keeps is what others load: PEFT and transformers on the dequantised base give the same log-probs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer, PreTrainedModel

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.files import PEFT_PREFIX
from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.data.records import decompress_rollouts
from orbit_runtime.loop import run
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.quant import int4
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.spec import OrbitRun
from orbit_runtime.storage import open_store
from orbit_runtime.types import AdapterFiles, Request, Sampling
from tests.integration.killing import small_manifest
from tests.integration.tiny_models import TARGETS, load_reference, reference_logprobs

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/precision.md"
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"type": "LoRA"},
    "OFT exact": {"type": "OFT", "oft": {"parametrization": "Cayley"}},
    "OFT Neumann": {"type": "OFT", "oft": {"parametrization": "CayleyNeumann"}},
}
TOKENS = [3, 27, 26, 20, 27, 25, 38, 1, 4, 30, 31, 1]


def trained(folder: Path, adapter: dict[str, Any]) -> Path:
    """Folder of the adapter that a short run kept."""
    manifest = small_manifest(steps=3)
    manifest["spec"]["adapter"] = adapter
    manifest["spec"]["training"]["learningRate"] = 0.02
    run(OrbitRun.model_validate(manifest), out=str(folder), progress=SilentProgress())
    return folder / "adapters" / "policy-v3"


def dequantised_base() -> PreTrainedModel:
    """transformers' model over the INT4 checkpoint's values, widened from our codec's BF16."""
    config = AdapterConfig(type="LoRA", targets=TARGETS)
    policy = load_policy(builtin_folder("tiny-adder", "INT4"), config)
    model = load_reference(builtin_folder("tiny-adder", "BF16"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = name.removesuffix(".weight")
            if module in policy.injected.layers:
                parameter.copy_(int4.dequantize(policy.injected.layers[module].base.packed).float())  # type: ignore[arg-type]
            elif "norm" in name:
                parameter.copy_(policy.model.get_parameter(name))
            else:
                parameter.copy_(policy.model.get_input_embeddings().weight.float())  # type: ignore[operator]
    return model


def fp32_policy(folder: Path) -> Policy:
    """Our side with the kept parameters, and R in fp32 as PEFT has it."""
    fields = json.loads((folder / "adapter_config.json").read_text())
    is_oft = fields["peft_type"] == "OFT"
    config = AdapterConfig(
        type="OFT" if is_oft else "LoRA",
        targets=TARGETS,
        parametrization="CayleyNeumann" if fields.get("use_cayley_neumann") else "Cayley",
        rotation_dtype="F32",
    )
    policy = load_policy(builtin_folder("tiny-adder", "INT4"), config)
    from safetensors.torch import load_file

    kept = {
        name.removeprefix(PEFT_PREFIX).removesuffix(".weight"): tensor.float()
        for name, tensor in load_file(folder / "adapter_model.safetensors").items()
    }
    with torch.no_grad():
        for name, parameter in policy.injected.masters.parameters.items():
            parameter.copy_(kept[name])
    return policy


def test_the_guides_call_of_the_chat_template_gives_the_prompts_that_were_trained_on(tmp_path: Path) -> None:
    trained(tmp_path, KINDS["LoRA"])
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    kept = decompress_rollouts((tmp_path / "rollouts" / "step-000001.jsonl.zst").read_bytes())
    assert len(kept) > 4
    for rollout in kept:
        asked, answered = rollout.turns
        found: dict[str, Any] = {"AutoTokenizer": AutoTokenizer, "base": builtin_folder("tiny-adder", "INT4")}
        exec(block.replace("12+34=", asked.text), found)
        assert found["ids"] == rollout.token_ids_T[: answered.start].tolist()
        assert found["ids"] != AutoTokenizer.from_pretrained(found["base"]).encode(asked.text)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_peft_on_the_dequantised_base_equals_our_policy(tmp_path: Path, kind: str) -> None:
    folder = trained(tmp_path / "run", KINDS[kind])
    base = dequantised_base()
    bare = reference_logprobs(base, TOKENS)
    theirs = reference_logprobs(PeftModel.from_pretrained(base, str(folder)).eval(), TOKENS)
    policy = fp32_policy(folder)
    batch = policy.pack([Branch(0, TOKENS[:1], TOKENS[1:])])
    with torch.no_grad(), policy.injected.selection.use(TRAINER_SLOT):
        ours, _ = policy.logprobs(batch)
    assert (theirs - bare).abs().max() > 0.01, "the adapter does something"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_engine_serves_the_kept_files_close_to_peft(tmp_path: Path, kind: str) -> None:
    """LoRA to rounding. OFT multiplies by the BF16 rotations that were published, which PEFT builds in fp32 itself."""
    folder = trained(tmp_path / "run", KINDS[kind])
    base = dequantised_base()
    theirs = reference_logprobs(PeftModel.from_pretrained(base, str(folder)).eval(), TOKENS)
    fields = json.loads((folder / "adapter_config.json").read_text())
    parametrization = "CayleyNeumann" if fields.get("use_cayley_neumann") else "Cayley"
    config = AdapterConfig(type=KINDS[kind]["type"], targets=TARGETS, parametrization=parametrization)
    model = builtin_folder("tiny-adder", "INT4")
    from orbit_runtime.data.chat import ChatTokenizer

    engine = TorchEngine(load_policy(model, config), ChatTokenizer(model), max_running_requests=4)
    store = open_store(str(tmp_path / "run"))
    digest = json.loads(store.get("adapters/policy-v3/manifest.json"))["facts"]["digest"]
    names = ("adapter_model.safetensors", "adapter_config.json", "rotations.safetensors")
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
    engine.load_adapter("policy-v3", AdapterFiles(3, files, digest))
    assert engine.adapter_digest("policy-v3") == digest
    served = torch.tensor(engine.score(TOKENS, ["policy-v3"])[0].logprobs_T[1:])
    assert (served - theirs).abs().mean() < (1e-5 if kind == "LoRA" else 0.02)
    # It may close because memory ran out in a step: an error of its own would hide that one.
    engine.submit([Request(0, 0, tuple(TOKENS[:4]), Sampling(max_new_tokens=8), "policy-v3")])
    engine.advance()
    engine.close()
    assert engine.adapters() == ()
