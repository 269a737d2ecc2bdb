"""`orbit merge`: the merged weights are those of dense arithmetic and of PEFT, its cost is what two models say, and an
adapter of another base is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from orbit_runtime.adapters import state
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.files import files_digest
from orbit_runtime.checkpoints.adapter_folder import AdapterFolder, open_adapter
from orbit_runtime.checkpoints.combine import combine
from orbit_runtime.cli.main import run_command
from orbit_runtime.errors import UnsupportedError, UsageError
from orbit_runtime.loop import run
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.content import weights_digest
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.policy import load_policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.quant.formats import FORMATS
from orbit_runtime.spec import OrbitRun
from tests.integration.killing import small_manifest
from tests.integration.tiny_models import TARGETS, load_reference, make_checkpoint, reference_logprobs
from tests.models.test_convert import in_bytes, tensors_of

LORA = AdapterConfig("LoRA", TARGETS, rank=8, alpha=12.0)
OFT = AdapterConfig("OFT", TARGETS, block_size=16)
CONFIGS = pytest.mark.parametrize("config", [LORA, OFT, replace(OFT, parametrization="Cayley")], ids=lambda c: c.type)
TOKENS = [3, 27, 26, 20, 27, 25, 38, 1, 4, 30, 31, 1]
Captured = pytest.CaptureFixture[str]


def keep_adapter(folder: Path, base: Path, config: AdapterConfig, *, seed: int, digest: str | None = "") -> Path:
    """A random adapter in a folder, as a publish keeps it."""
    policy = load_policy(base, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.injected.masters.parameters.items():
            size = 0.3 / parameter.shape[1] ** 0.5 if "lora_B" in name else 0.05
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    files = state.export_adapter(policy.injected, config, "base")
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    facts = {"version": 1, "digest": files_digest(files)}
    if digest is not None:
        facts |= {"base": {"weights": digest or weights_digest(base)}}
    manifest = {"format": 1, "kind": "adapter", "execution": 1, "parts": {}, "facts": facts, "written": 0.0}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def dense_merged(weights: dict[str, Tensor], adapter: AdapterFolder, factor: float = 1.0) -> dict[str, Tensor]:
    """Explicit arithmetic in fp64: W + s B A, or W times the transpose of the block-diagonal R."""
    tensors = load_file(Path(adapter.place) / "adapter_model.safetensors")
    merged = dict(weights)
    for module in adapter.modules():
        w = weights[f"{module}.weight"].double()
        if adapter.type == "LoRA":
            A, B = (tensors[f"base_model.model.{module}.lora_{kind}.weight"].double() for kind in "AB")
            w = w + factor * adapter.scaling * B @ A
        else:
            R = load_file(Path(adapter.place) / "rotations.safetensors")[f"{module}.oft_R"].double()
            w = w @ torch.block_diag(*R).mT
        merged[f"{module}.weight"] = w
    return merged


def merge(*arguments: str, capsys: Captured, code: int = 0) -> dict[str, Any]:
    ended = run_command(["merge", *arguments, "--json"])
    said = capsys.readouterr()
    assert ended == code, said.out + said.err
    assert "Traceback" not in said.err
    result: dict[str, Any] = json.loads(said.out)
    return result


def logprobs(folder: Path, adapter: Path | None = None, config: AdapterConfig = LORA) -> Tensor:
    """Ours: of a model alone, or with the published adapter in a slot."""
    policy = load_policy(folder, config)
    if adapter is not None:
        names = ("adapter_config.json", "adapter_model.safetensors", "rotations.safetensors")
        files = {name: (adapter / name).read_bytes() for name in names if (adapter / name).exists()}
        state.load_slot(policy.injected.layers, "one", files)
    with torch.no_grad(), policy.injected.selection.use("one" if adapter else None):
        return policy.logprobs(policy.pack([Branch(0, TOKENS[:1], TOKENS[1:])]))[0]


@CONFIGS
def test_merged_weights_are_those_of_dense_arithmetic_and_of_peft(
    tmp_path: Path, capsys: Captured, config: AdapterConfig
) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3")
    kept = keep_adapter(tmp_path / "adapter", base, config, seed=1)
    out = tmp_path / "merged"
    result = merge(str(kept), "--out", str(out), "--base", str(base), capsys=capsys)
    written = tensors_of(out)
    exact = dense_merged(tensors_of(base), open_adapter(str(kept)))
    assert written.keys() == exact.keys()
    for name, wanted in exact.items():
        # One rounding to BF16; products in fp32 may fall on the other side of a tie.
        assert (written[name].double() - wanted.double()).abs().max() <= 2**-8 * wanted.abs().max()
        if name.removesuffix(".weight") not in result["adapted_modules"]:
            assert torch.equal(written[name], wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = PeftModel.from_pretrained(load_reference(base), str(kept)).merge_and_unload()
    for name, parameter in theirs.named_parameters():
        # PEFT rotates by fp32 R, Orbit by the BF16 R that was published and sampled from.
        bound = 2**-8 if config.type == "LoRA" else 2**-5
        assert (written[name].float() - parameter).abs().max() <= bound * parameter.abs().max()
    bare, ours = logprobs(base, config=config), logprobs(base, kept, config)
    assert (ours - bare).abs().max() > 0.1, "the adapter must matter, or nothing was compared"
    merged = reference_logprobs(load_reference(out), TOKENS)
    assert (merged - ours).abs().mean() < 0.05
    cost = result["cost"]
    assert cost["tokens"] > 0
    assert 0 < cost["mean"] < 0.05
    assert 0 < cost["k3"] < 0.01


@pytest.mark.parametrize("precision", ["INT4", "NVFP4", "FP8"])
def test_into_a_packed_base_only_adapted_modules_are_quantised_again(
    tmp_path: Path, capsys: Captured, precision: str
) -> None:
    base = builtin_folder("tiny-adder", precision)
    config = replace(LORA, targets=("q_proj", "v_proj"))
    kept = keep_adapter(tmp_path / "adapter", base, config, seed=1)
    out = tmp_path / "merged"
    arguments = (str(kept), "--out", str(out), "--base", str(base), "--precision", precision)
    result = merge(*arguments, capsys=capsys)
    before, after = tensors_of(base), tensors_of(out)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(in_bytes(before[name]), in_bytes(after[name]))}
    assert changed
    again = set(result["adapted_modules"])
    if precision == "NVFP4":
        # k_proj shares its global scale with q_proj and v_proj, which engines fuse with it.
        again |= {f"model.layers.{layer}.self_attn.k_proj" for layer in range(4)}
    assert {name.rsplit(".", 1)[0] for name in changed} <= again
    assert result["modules"].keys() == again
    codec = FORMATS[result["layout"]]
    for module in result["adapted_modules"]:
        w = codec.dequantize(codec.from_checkpoint(before, module), torch.float32)
        wanted = dense_merged({f"{module}.weight": w}, _only(open_adapter(str(kept)), module))[f"{module}.weight"]
        got = codec.dequantize(codec.from_checkpoint(after, module), torch.float64)
        error = float((got - wanted).norm() / wanted.norm())
        assert result["modules"][module]["relative_rms"] == pytest.approx(error, rel=1e-3)
    exact = merge(*arguments[:2], str(tmp_path / "bf16"), *arguments[3:5], capsys=capsys)
    assert exact["precision"] == "BF16"
    assert exact["cost"]["mean"] < result["cost"]["mean"], "BF16 keeps more of the adapter"


def _only(adapter: AdapterFolder, module: str) -> AdapterFolder:
    tensors = {n: i for n, i in adapter.header.tensors.items() if f".{module}." in f".{n}"}
    return replace(adapter, header=replace(adapter.header, tensors=tensors))


def test_an_adapter_that_a_run_kept_names_its_base_and_is_refused_by_another(tmp_path: Path, capsys: Captured) -> None:
    run(OrbitRun.model_validate(small_manifest(steps=1)), out=str(tmp_path / "run"), progress=SilentProgress())
    kept = tmp_path / "run/adapters/policy-v1"
    assert run_command(["inspect", str(kept), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["base_weights"] == weights_digest(builtin_folder("tiny-adder", "INT4"))
    assert (said["kind"], said["policy_version"]) == ("adapter", 1)
    out = tmp_path / "merged"
    for other in (str(make_checkpoint(tmp_path / "other", "qwen3")), "builtin://tiny-caller"):
        told = merge(str(kept), "--out", str(out), "--base", other, "--unchecked-base", capsys=capsys, code=66)
        assert "trained on another base" in told["message"]
        assert told["fix"] == f"name the base that it was trained on; {other} is another"
    absent = ("--measure", "absent.jsonl")
    told = merge(str(kept), "--out", str(out), "--base", "builtin://tiny-adder", *absent, capsys=capsys, code=65)
    assert told["where"] == "--measure absent.jsonl"
    assert "spec." not in told["fix"], "there is no manifest here"
    assert not out.exists()
    result = merge(str(kept), "--out", str(out), "--base", "builtin://tiny-adder", "--measure", "none", capsys=capsys)
    assert result["cost"] is None
    (kept / "adapter_model.safetensors").write_bytes((kept / "adapter_model.safetensors").read_bytes()[:-2] + b"\0\0")
    told = merge(str(kept), "--out", str(out / "x"), "--base", "builtin://tiny-adder", capsys=capsys, code=66)
    assert "SHA-256" in told["message"]


def test_an_adapter_that_does_not_name_its_base_needs_a_word(tmp_path: Path, capsys: Captured) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3")
    kept = keep_adapter(tmp_path / "adapter", base, LORA, seed=1, digest=None)
    arguments = (str(kept), "--out", str(tmp_path / "merged"), "--base", str(base), "--measure", "none")
    told = merge(*arguments, capsys=capsys, code=66)
    assert "--unchecked-base" in told["fix"]
    merge(*arguments, "--unchecked-base", capsys=capsys)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rank", "has rank 200"),
        ("shape", "the base's weight is [64, 64]"),
        ("stranger", "which is not a linear layer of the base"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_with_the_module(
    tmp_path: Path, capsys: Captured, change: str, words: str
) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3")
    folder = tmp_path / "adapter"
    folder.mkdir()
    module = "model.layers.0.self_attn.q_proj" if change != "stranger" else "model.layers.7.self_attn.q_proj"
    rank, columns = (200, 64) if change == "rank" else (4, 48 if change == "shape" else 64)
    prefix = f"base_model.model.{module}"
    tensors = {f"{prefix}.lora_A.weight": torch.ones(rank, columns), f"{prefix}.lora_B.weight": torch.ones(64, rank)}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8}))
    arguments = (str(folder), "--out", str(tmp_path / "m"), "--base", str(base), "--unchecked-base")
    told = merge(*arguments, capsys=capsys, code=66)
    assert words in told["message"]
    assert module in told["message"]
    assert not (tmp_path / "m").exists()


def test_lora_adapters_combine_as_in_peft_and_as_in_dense_arithmetic(tmp_path: Path, capsys: Captured) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3")
    one = keep_adapter(tmp_path / "one", base, LORA, seed=1)
    two = keep_adapter(tmp_path / "two", base, replace(LORA, rank=4, alpha=6.0, targets=TARGETS[:3]), seed=2)
    out = tmp_path / "both"
    result = merge(str(one), str(two), "--out", str(out), "--weight", "0.5", "--weight", "2", capsys=capsys)
    assert (result["rank"], result["modules"]) == (12, 14)
    # 12/8 and 6/4 are one scaling and the weights powers of two: nothing was rounded.
    assert result["deviation"] < 1e-6
    halves = dense_merged(tensors_of(base), open_adapter(str(one)), 0.5)
    wanted = dense_merged(halves, open_adapter(str(two)), 2.0)
    got = dense_merged(tensors_of(base), open_adapter(str(out)))
    for name in wanted:
        torch.testing.assert_close(got[name].double(), wanted[name].double(), rtol=0, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(load_reference(base), str(one), adapter_name="one")
        model.load_adapter(str(two), adapter_name="two")
        model.add_weighted_adapter(["one", "two"], [0.5, 2.0], "both", combination_type="cat")
        model.set_adapter("both")
        theirs = reference_logprobs(model.eval(), TOKENS)
        again = reference_logprobs(PeftModel.from_pretrained(load_reference(base), str(out)).eval(), TOKENS)
    torch.testing.assert_close(again, theirs, rtol=0, atol=1e-5)
    loaded = logprobs(base, out, AdapterConfig("LoRA", TARGETS, rank=12, alpha=9.0))
    torch.testing.assert_close(loaded, theirs, rtol=0, atol=1e-4)
    assert open_adapter(str(out)).base_weights == weights_digest(base)


@pytest.mark.parametrize("parametrization", ["Cayley", "CayleyNeumann"])
def test_oft_adapters_combine_into_the_product_of_their_rotations(
    tmp_path: Path, capsys: Captured, parametrization: str
) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3")
    config = replace(OFT, parametrization=parametrization)
    one, two = (keep_adapter(tmp_path / str(seed), base, config, seed=seed) for seed in (1, 2))
    result = merge(str(one), str(two), "--out", str(tmp_path / "both"), capsys=capsys)
    # Five terms of Neumann's series, and BF16, are orthogonal only nearly.
    bound = 0.02 if parametrization == "Cayley" else 0.06
    assert result["deviation"] < bound
    adapters = [open_adapter(str(one)), open_adapter(str(two))]
    wanted = dense_merged(dense_merged(tensors_of(base), adapters[0]), adapters[1])
    backwards = dense_merged(dense_merged(tensors_of(base), adapters[1]), adapters[0])
    got = dense_merged(tensors_of(base), open_adapter(str(tmp_path / "both")))
    for name, value in wanted.items():
        assert (got[name].double() - value.double()).abs().max() <= bound * value.abs().max()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (wanted[name] - backwards[name]).abs().max() > 0.05 * wanted[name].abs().max(), "the order matters"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = PeftModel.from_pretrained(load_reference(base), str(tmp_path / "both")).merge_and_unload()
    for name, parameter in theirs.named_parameters():
        assert (parameter.double() - wanted[name].double()).abs().max() <= bound * wanted[name].abs().max()
    # And our own side takes it up.
    logprobs(base, tmp_path / "both", replace(OFT, parametrization="Cayley"))
    merge(str(one), str(two), "--out", str(tmp_path / "x"), "--weight", "1", "--weight", "2", capsys=capsys, code=64)


def test_peft_s_own_adapter_merges_once_its_base_is_vouched_for(tmp_path: Path, capsys: Captured) -> None:
    base = make_checkpoint(tmp_path / "base", "llama")
    torch.manual_seed(0)
    settings = LoraConfig(r=16, lora_alpha=8, use_rslora=True, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(load_reference(base), settings)
    model.save_pretrained(tmp_path / "theirs")
    out = tmp_path / "merged"
    arguments = (str(tmp_path / "theirs"), "--out", str(out), "--base", str(base), "--unchecked-base")
    merge(*arguments, capsys=capsys)
    merged = model.merge_and_unload()
    for name, parameter in merged.named_parameters():
        assert (tensors_of(out)[name].float() - parameter).abs().max() <= 2**-8 * parameter.abs().max()


def test_lora_and_oft_do_not_combine_and_neither_do_other_blocks(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3")
    lora = open_adapter(str(keep_adapter(tmp_path / "lora", base, LORA, seed=1)))
    oft = open_adapter(str(keep_adapter(tmp_path / "oft", base, OFT, seed=1)))
    small = open_adapter(str(keep_adapter(tmp_path / "small", base, replace(OFT, block_size=8), seed=1)))
    with pytest.raises(UnsupportedError, match="LoRA and OFT"):
        combine([lora, oft], [1, 1])
    with pytest.raises(UnsupportedError, match="blocks of 8 and 16"):
        combine([oft, small], [1, 1])
    with pytest.raises(UsageError, match="1 weights for 2"):
        combine([lora, lora], [1])


def test_a_copied_adapter_folder_is_the_same_adapter(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3")
    kept = keep_adapter(tmp_path / "adapter", base, LORA, seed=1)
    shutil.copytree(kept, tmp_path / "copy")
    assert open_adapter(str(tmp_path / "copy")).files == open_adapter(str(kept)).files
