"""`orbit merge` with adapters of routed experts: the merged model is the policy with the adapter, in every layout and
family, by explicit arithmetic for each expert and by transformers alone."""

from __future__ import annotations

import functools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from orbit_runtime.adapters import state
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.checkpoints.adapter_folder import AdapterFolder, describe_adapter, open_adapter
from orbit_runtime.checkpoints.combine import EVERY, combine
from orbit_runtime.checkpoints.merge import NamedBase, base_target, merge_adapters, merge_into_base
from orbit_runtime.checkpoints.target import build_target
from orbit_runtime.cli.main import run_command
from orbit_runtime.errors import ModelError, UnsupportedError
from orbit_runtime.loop import run
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.policy import load_policy
from orbit_runtime.policy.families.deepseek_v4 import checkpoint_name
from orbit_runtime.policy.packed import Branch
from orbit_runtime.quant.formats import FORMATS
from orbit_runtime.spec import OrbitRun
from tests.integration.killing import small_manifest
from tests.integration.tiny_families import make_family
from tests.integration.tiny_models import load_reference, reference_logprobs
from tests.models.test_convert import in_bytes, tensors_of
from tests.models.test_merge import TOKENS, Captured, keep_adapter, merge

GATED = ("o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = {"gpt_oss": ("o_proj", "gate_up_proj", "down_proj"), "deepseek_v4": (*GATED[1:], "q_b_proj")}
LORA = AdapterConfig("LoRA", GATED, rank=4, alpha=6.0)
OFT = AdapterConfig("OFT", GATED, block_size=16)
LAYOUTS = [
    *(replace(LORA, experts=layout) for layout in ("SharedOuter", "Shared", "PerExpert")),
    *(replace(OFT, experts=layout) for layout in ("Shared", "SharedOuter", "PerExpert")),
]  # fmt: skip
ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
STACKED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "gate_up_proj": "gate_up_proj"}


@functools.cache
def loaded(path: Path) -> dict[str, Tensor]:
    return load_file(path)


def own_name(module: str, family: str) -> str:
    """The checkpoint's name of a module → transformers'."""
    if family != "deepseek_v4":
        return module.removeprefix("language_model.")
    for was, now in (("ffn", "mlp"), ("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"),
                     ("attn", "self_attn"), ("wq_b", "q_b_proj")):  # fmt: skip
        module = re.sub(rf"\.{was}(?=\.|$)", f".{now}", module)
    return f"model.{module}"


def by_hand(w: Tensor, module: str, adapter: AdapterFolder) -> Tensor:
    """fp32 W' of a dense layer or of one expert, straight from the files; W if the adapter has nothing for it."""
    tensors = loaded(Path(adapter.place) / "adapter_model.safetensors")
    found = ONE_EXPERT.fullmatch(module)
    stacked = f"{found[1]}.{STACKED.get(found[3])}" if found else ""

    def read(kind: str, tensors: dict[str, Tensor], form: str) -> Tensor | None:
        if form.format(module, kind) in tensors:
            return tensors[form.format(module, kind)].float()
        every = tensors.get(form.format(stacked, kind))
        return None if every is None or found is None else every[int(found[2]) if len(every) > 1 else 0].float()

    if adapter.type == "LoRA":
        A, B = (read(kind, tensors, "base_model.model.{}.{}.weight") for kind in ("lora_A", "lora_B"))
        return w.float() if A is None or B is None else w.float() + adapter.scaling * (B @ A)
    R = read("oft_R", loaded(Path(adapter.place) / "rotations.safetensors"), "{}.{}")
    return w.float() if R is None else w.float() @ torch.block_diag(*R).mT


def merged_by_hand(tensors: dict[str, Tensor], family: str, adapter: AdapterFolder) -> dict[str, Tensor]:
    """The checkpoint's tensors, each with the adapter; those that it changes in fp32."""
    made = {}
    for name, tensor in tensors.items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            parent, _, leaf = name.rpartition(".")
            each = [by_hand(w.t(), f"{parent}.{expert}.{leaf}", adapter).t() for expert, w in enumerate(tensor)]
            made[name] = torch.stack(each)
        elif name.endswith(".weight") and tensor.ndim == 2 and tensor.dtype == torch.bfloat16:
            changed = by_hand(tensor, own_name(name.removesuffix(".weight"), family), adapter)
            made[name] = tensor if torch.equal(changed, tensor.float()) else changed
        else:
            made[name] = tensor
    return made


def keep(folder: Path, base: Path, config: AdapterConfig, *, seed: int = 1) -> AdapterFolder:
    return open_adapter(str(keep_adapter(folder, base, config, seed=seed)))


def into_base(base: Path, adapters: list[AdapterFolder], folder: Path, precision: str = "BF16") -> dict[str, Tensor]:
    target = base_target(base, precision) or build_target(precision, None, None, ())
    named = NamedBase(base, "base")
    merge_into_base(named, adapters, [1.0] * len(adapters), folder, target, unchecked=False, show=lambda *_: None)
    return tensors_of(folder)


def policy_logprobs(base: Path, config: AdapterConfig, adapter: AdapterFolder | None = None) -> Tensor:
    """Ours: of the model alone, or with the published adapter in a slot."""
    policy = load_policy(base, config)
    if adapter is not None:
        state.load_slot(policy.injected.layers, "one", adapter.files)
    with torch.no_grad(), policy.injected.selection.use("one" if adapter else None):
        return policy.logprobs(policy.pack([Branch(0, TOKENS[:1], TOKENS[1:])]))[0]


def theirs(plain: Path, tensors: dict[str, Tensor], folder: Path) -> Tensor:
    """Log-probs of transformers alone, with these values in the place of the base's."""
    shutil.copytree(plain, folder)
    text = {name.removeprefix("language_model."): each.contiguous() for name, each in tensors.items()
            if not name.startswith(("vision_tower.", "mm_projector."))}  # fmt: skip
    save_file(text, folder / "model.safetensors", metadata={"format": "pt"})
    return reference_logprobs(load_reference(folder), TOKENS)


def check_family(tmp_path: Path, family: str, layout: str, config: AdapterConfig) -> None:
    """A base of this family merges to what is computed by hand, and that is the policy with the adapter."""
    config = replace(config, targets=TARGETS.get(family, GATED))
    base, plain = make_family(tmp_path, family, layout)
    adapter = keep(tmp_path / "adapter", base, config)
    written = into_base(base, [adapter], tmp_path / "merged")
    before = tensors_of(plain)
    if family == "kimi_k25":
        before = {f"language_model.{name}": each for name, each in before.items()}
        before |= {name: each for name, each in tensors_of(base).items() if not name.startswith("language_model.")}
    wanted = merged_by_hand(before, family, adapter)
    assert written.keys() == wanted.keys()
    changed = 0
    for name, exact in wanted.items():
        assert torch.equal(written[name], exact.to(written[name].dtype)) or is_rounded(written[name], exact), name
        changed += exact.dtype == torch.float32 and before[name].dtype == torch.bfloat16
    assert changed >= 6
    ours, bare = policy_logprobs(base, config, adapter), policy_logprobs(base, config)
    assert (ours - bare).abs().max() > 0.1, "the adapter must matter, or nothing was compared"
    torch.testing.assert_close(theirs(plain, wanted, tmp_path / "exact"), ours, rtol=0, atol=2e-4)
    assert (theirs(plain, written, tmp_path / "rounded") - ours).abs().mean() < 0.1


def is_rounded(written: Tensor, exact: Tensor) -> bool:
    """Whether few values differ from one rounding, by a bit: two orders of a sum may fall on two sides of a tie."""
    rounded = exact.to(torch.bfloat16)
    others = written != rounded
    close = (written.float() - rounded.float()).abs() <= 2**-7 * rounded.float().abs().clamp(min=2**-10)
    return int(others.sum()) <= max(1, others.numel() // 1000) and bool(close.all())


@pytest.mark.parametrize("config", LAYOUTS, ids=lambda config: f"{config.type}-{config.experts}")
def test_every_layout_merges_to_the_model_that_transformers_loads(tmp_path: Path, config: AdapterConfig) -> None:
    check_family(tmp_path, "qwen3_moe", "BF16", config)
    alone = reference_logprobs(load_reference(tmp_path / "merged"), TOKENS)
    assert torch.equal(alone, reference_logprobs(load_reference(tmp_path / "rounded"), TOKENS))


@pytest.mark.parametrize("config", [LORA, OFT], ids=lambda config: config.type)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("glm4_moe", "BF16"), ("deepseek_v3", "FP8Block"), ("kimi_k2", "INT4"), ("kimi_k25", "INT4"),
        ("gpt_oss", "BF16"), ("gpt_oss", "MXFP4GptOss"), ("deepseek_v4", "BF16"), ("deepseek_v4", "MXFP4V4"),
    ],
)  # fmt: skip
def test_every_family_merges_to_bf16(tmp_path: Path, family: str, layout: str, config: AdapterConfig) -> None:
    check_family(tmp_path, family, layout, config)


@pytest.mark.parametrize("config", [LORA, OFT], ids=lambda config: config.type)
@pytest.mark.parametrize(("family", "layout"), [("gpt_oss", "MXFP4GptOss"), ("deepseek_v4", "BF16")])
def test_adapters_for_each_expert_of_families_with_other_names(
    tmp_path: Path, family: str, layout: str, config: AdapterConfig
) -> None:
    check_family(tmp_path, family, layout, replace(config, experts="PerExpert"))


@pytest.mark.parametrize("config", [LORA, replace(OFT, experts="PerExpert")], ids=lambda config: config.type)
@pytest.mark.parametrize("layout", ["INT4", "INT4Asymmetric", "FP8", "FP8Block", "NVFP4", "NVFP4ModelOpt", "MXFP4"])
def test_experts_are_quantised_again_in_the_base_s_format(tmp_path: Path, layout: str, config: AdapterConfig) -> None:
    config = replace(config, targets=GATED[1:])
    base, plain = make_family(tmp_path, "qwen3_moe", layout)
    adapter = keep(tmp_path / "adapter", base, config)
    target = base_target(base, FORMATS[layout].precision)
    assert target is not None
    result = merge_into_base(
        NamedBase(base, "base"), [adapter], [1.0], tmp_path / "merged", target, unchecked=False, show=lambda *_: None
    )  # fmt: skip
    before, after = tensors_of(base), tensors_of(tmp_path / "merged")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(in_bytes(before[name]), in_bytes(after[name]))}
    every = {f"model.layers.{layer}.mlp.experts.{expert}.{leaf}"
             for layer in range(2) for expert in range(8) for leaf in GATED[1:]}  # fmt: skip
    assert {name.rsplit(".", 1)[0] for name in changed} == set(result.modules) == every
    codec = FORMATS[layout]
    dense = tensors_of(plain)
    for module in result.modules:
        exact = by_hand(dense[f"{module}.weight"], module, adapter).double()
        error = float((codec.dequantize(codec.from_checkpoint(after, module), torch.float64) - exact).norm())
        reported = result.written.modules[module]["relative_rms"]
        assert reported == pytest.approx(error / float(exact.norm()), rel=1e-3)
        assert reported < 0.2
    assert bool(policy_logprobs(tmp_path / "merged", config).isfinite().all())


def test_a_bf16_base_is_quantised_with_its_adapter(tmp_path: Path) -> None:
    base, _ = make_family(tmp_path, "glm4_moe", "BF16")
    adapter = keep(tmp_path / "adapter", base, LORA)
    after = into_base(base, [adapter], tmp_path / "merged", "INT4")
    codec, module = FORMATS["INT4"], "model.layers.1.mlp.experts.7.up_proj"
    exact = by_hand(tensors_of(base)[f"{module}.weight"], module, adapter)
    got = codec.dequantize(codec.from_checkpoint(after, module), torch.float32)
    assert (got - exact).norm() < 0.2 * exact.norm()


@pytest.mark.parametrize(
    ("one", "two", "layout"),
    [
        (LORA, replace(LORA, rank=2, alpha=3.0), "SharedOuter"),
        (LORA, replace(LORA, experts="Shared", targets=GATED[:3]), "SharedOuter"),
        (replace(LORA, experts="Shared"), replace(LORA, experts="PerExpert", targets=GATED[2:]), "PerExpert"),
        (replace(LORA, experts="Shared"), replace(LORA, experts="Shared"), "Shared"),
        (OFT, OFT, "Shared"),
        (OFT, replace(OFT, experts="SharedOuter"), "SharedOuter"),
        (replace(OFT, experts="PerExpert"), replace(OFT, experts="SharedOuter"), "PerExpert"),
    ],
    ids=lambda each: each if isinstance(each, str) else f"{each.type}-{each.expert_layout}",
)
def test_adapters_of_experts_combine_into_one(
    tmp_path: Path, one: AdapterConfig, two: AdapterConfig, layout: str
) -> None:
    base, plain = make_family(tmp_path, "qwen3_moe", "BF16")
    adapters = [keep(tmp_path / "1", base, one, seed=1), keep(tmp_path / "2", base, two, seed=2)]
    weights = [0.5, 2.0] if one.type == "LoRA" else [1.0, 1.0]
    made = merge_adapters(adapters, weights, tmp_path / "both")
    both = open_adapter(str(tmp_path / "both"))
    assert (both.expert_layout, both.base_weights) == (layout, adapters[0].base_weights)
    if one.type == "LoRA":
        assert made.deviation == 0.0, "scalings that differ by powers of two"
    bound = 1e-5 if one.type == "LoRA" else 0.06
    before = tensors_of(base)
    weighed = [replace(each, config={**each.config, "lora_alpha": weight * each.config.get("lora_alpha", 1)})
               for each, weight in zip(adapters, weights, strict=True)]  # fmt: skip
    for name, w in before.items():
        if name.endswith("proj.weight"):
            module = name.removesuffix(".weight")
            # Twice by hand: the second starts from fp32.
            exact = by_hand(by_hand(w, module, weighed[0]), module, weighed[1])
            assert (by_hand(w, module, both) - exact).abs().max() <= bound * exact.abs().max(), name
    # And our own side takes it up, as transformers does what is computed by hand.
    wanted, merged = merged_by_hand(before, "qwen3_moe", both), into_base(base, [both], tmp_path / "merged")
    config = replace(one, experts=layout, rank=made.rank, alpha=both.config.get("lora_alpha", 1.0))
    ours = policy_logprobs(base, replace(config, parametrization="Cayley"), both)
    torch.testing.assert_close(theirs(plain, wanted, tmp_path / "exact"), ours, rtol=0, atol=2e-4)
    assert all(is_rounded(merged[name], wanted[name]) for name in before)


def test_experts_are_views_of_the_file_until_they_are_computed(tmp_path: Path) -> None:
    base, _ = make_family(tmp_path, "qwen3_moe", "BF16")
    adapter = keep(tmp_path / "adapter", base, LORA)
    combined = combine([adapter], [1.0])
    (part,) = combined.lora["model.layers.1.mlp.experts.up_proj"]
    assert (set(part.lora_A), set(part.lora_B)) == ({EVERY}, set(range(8)))
    held = [*part.lora_A.values(), *part.lora_B.values()]
    assert {each.dtype for each in held} == {torch.bfloat16}
    assert len({each.untyped_storage().data_ptr() for each in part.lora_B.values()}) == 1, "views of the file"


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path: Path) -> None:
    out = tmp_path / "merged"
    for family, layout, precision, words in (
        ("gpt_oss", "BF16", "INT4", "in one tensor"),
        ("gpt_oss", "MXFP4GptOss", "MXFP4", "reads but does not write"),
        ("gpt_oss", "MXFP4GptOss", "INT4", "in one tensor"),
        ("deepseek_v4", "FP8BlockV4", "FP8", "reads but does not write"),
        ("qwen3_moe", "INT4", "FP8", "no adapter changes it"),
    ):
        folder = tmp_path / f"{family}-{layout}-{precision}"
        base, _ = make_family(folder, family, layout)
        adapter = keep(folder / "adapter", base, replace(LORA, targets=("down_proj",)))
        with pytest.raises(UnsupportedError, match=words) as caught:
            into_base(base, [adapter], out, precision)
        assert "BF16" in str(caught.value.fix)
    assert not out.exists()


def test_an_adapter_of_other_experts_is_refused(tmp_path: Path) -> None:
    base, _ = make_family(tmp_path / "eight", "qwen3_moe", "BF16")
    other, _ = make_family(tmp_path / "four", "qwen3_moe", "BF16", sizes={"num_experts": 4})
    for layout in ("SharedOuter", "PerExpert"):
        kept = keep_adapter(tmp_path / layout, base, replace(LORA, experts=layout), seed=1, digest=None)
        target = build_target("BF16", None, None, ())
        with pytest.raises(ModelError, match="is for 8 experts, the base has 4"):
            merge_into_base(
                NamedBase(other, "other"), [open_adapter(str(kept))], [1.0], tmp_path / "m", target, unchecked=True,
                show=lambda *_: None,
            )  # fmt: skip
    four = keep(tmp_path / "adapter", other, LORA)
    with pytest.raises(ModelError, match="is for 4 experts, another for 8"):
        combine([open_adapter(str(tmp_path / "SharedOuter")), four], [1.0, 1.0])
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("config", LAYOUTS, ids=lambda config: f"{config.type}-{config.experts}")
def test_an_adapter_of_experts_is_described_by_its_layout(tmp_path: Path, config: AdapterConfig) -> None:
    base, _ = make_family(tmp_path, "qwen3_moe", "BF16")
    said = describe_adapter(keep(tmp_path / "adapter", base, config))
    assert said["experts"] == config.experts
    assert (said["modules"], said["targets"]) == (8, dict.fromkeys(sorted(GATED), 2))


@pytest.mark.parametrize("kind", ["LoRA", "OFT"])
def test_the_adapter_of_a_run_is_inspected_merged_and_measured(tmp_path: Path, capsys: Captured, kind: str) -> None:
    manifest = small_manifest(steps=1)
    manifest["spec"]["model"]["uri"] = "builtin://tiny-moe-adder"
    manifest["spec"]["adapter"] = {"type": kind}
    run(OrbitRun.model_validate(manifest), out=str(tmp_path / "run"), progress=SilentProgress())
    kept = str(tmp_path / "run/adapters/policy-v1")
    assert run_command(["inspect", kept, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["experts"] == ("SharedOuter" if kind == "LoRA" else "Shared")
    out = tmp_path / "merged"
    result = merge(kept, "--out", str(out), "--base", "builtin://tiny-moe-adder", capsys=capsys)
    assert result["cost"]["tokens"] > 0
    assert result["cost"]["mean"] < 0.05
    assert any(".experts." in module for module in result["adapted_modules"])


def test_the_names_of_the_test_are_those_of_the_published_model() -> None:
    """`own_name` is written by hand; the table that loading uses is another."""
    for module in ("layers.1.ffn.experts.3.w2", "layers.0.ffn.shared_experts.w1", "layers.2.attn.wq_b"):
        assert checkpoint_name(own_name(module, "deepseek_v4")) == module
