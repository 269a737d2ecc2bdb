"""The shipped model, read by the libraries it was written for: transformers and compressed-tensors."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from orbit_runtime.model_info.builtin_models import builtin_folder

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "make_tiny_adder.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tiny_adder", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "precision", ["BF16", "INT4", *(pytest.param(each, marks=pytest.mark.long) for each in ("FP8", "MXFP4", "NVFP4"))]
)
def test_a_fifth_to_a_third_of_the_samples_is_right(script: ModuleType, precision: str) -> None:
    sampled, greedy = script.accuracy(builtin_folder("tiny-adder", precision), samples=1024, seed=7)
    assert 0.20 <= sampled <= 0.35
    assert greedy > sampled + 0.3, "there must be something for reinforcement learning to find"


def test_the_two_variants_hold_the_same_values() -> None:
    arguments = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    bf16 = load_file(builtin_folder("tiny-adder", "BF16") / "model.safetensors")
    int4 = load_file(builtin_folder("tiny-adder", "INT4") / "model.safetensors")
    packed = [name.removesuffix("_packed") for name in int4 if name.endswith("weight_packed")]
    assert len(packed) == 4 * 7
    for name in packed:
        parts = {f"weight{part}": int4[name + part] for part in ("_packed", "_scale", "_shape")}
        assert parts["weight_packed"].dtype == torch.int32
        assert parts["weight_scale"].dtype == torch.bfloat16
        assert parts["weight_scale"].shape == (bf16[name].shape[0], bf16[name].shape[1] // 32)
        assert torch.equal(PackedQuantizationCompressor.decompress(parts, scheme)["weight"], bf16[name])
    for name in bf16.keys() - set(packed):
        assert torch.equal(bf16[name], int4[name])


def test_transformers_reads_the_same_policy_from_both() -> None:
    ids = torch.tensor([AutoTokenizer.from_pretrained(builtin_folder("tiny-adder", "INT4"))("12+34=")["input_ids"]])
    # BF16, because only there does it round a decompressed weight as the format's canonical order does.
    logits = [
        AutoModelForCausalLM.from_pretrained(builtin_folder("tiny-adder", precision), dtype=torch.bfloat16)(ids).logits
        for precision in ("BF16", "INT4")
    ]
    assert torch.equal(logits[0], logits[1])


def test_text_and_chat_survive_the_tokenizer() -> None:
    folder = builtin_folder("tiny-adder", "INT4")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "  Two lines,\n\t12+34=46? {~}  "
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "12+34="}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|user|>12+34=<|im_end|><|assistant|>"
    assert len(tokenizer(rendered)["input_ids"]) == 9
    answered = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "46"}], tokenize=False)
    assert answered == rendered + "46<|im_end|>"
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id]
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == len(tokenizer)


def test_every_file_but_the_weights_is_made_again_byte_for_byte(script: ModuleType, tmp_path: Path) -> None:
    quantization = {"bf16": None, "int4": script.quantization_config()}
    quantization |= {variant: script.repacked_config(variant) for variant in script.REPACKED}
    for variant, block in quantization.items():
        script.save_variant(tmp_path / variant, {}, block)
    shipped = json.loads((script.BUILTIN / "digests.json").read_text())[script.NAME]
    for variant, files in script.digests(tmp_path).items():
        differing = {name for name, digest in files.items() if shipped[variant][name] != digest}
        assert differing == {"model.safetensors"}


def test_training_gives_the_same_bits_again(script: ModuleType) -> None:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        weights = []
        for _ in range(2):
            torch.rand(1)  # the global generator has moved, and it must not matter
            generator = torch.Generator().manual_seed(3)
            model = script.build_model(generator)
            script.train_phase(model, script.Phase(2, 1e-3, 0.5, quantised=True), generator)
            weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
    assert torch.equal(weights[0], weights[1])
