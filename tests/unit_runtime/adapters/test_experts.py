"""Adapters of routed experts against dense twins in plain autograd, PEFT, and the planner's count."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.kernel_weights import stack_experts
from torch import Tensor, nn

from orbit_runtime.adapters import state
from orbit_runtime.adapters.config import AdapterConfig, InjectReport
from orbit_runtime.adapters.files import MODEL_FILE, expert_file_names, layer_of
from orbit_runtime.adapters.inject import InjectedAdapter, inject
from orbit_runtime.adapters.layer import Dropout
from orbit_runtime.adapters.oft import constrained, rotations, series_error, skew_symmetric
from orbit_runtime.errors import ManifestError
from orbit_runtime.policy.experts import FrozenExperts, gated
from orbit_runtime.quant import int4
from orbit_runtime.quant.expert_linear import FrozenExpertLinear

E, N, INNER, TOKENS, TOP = 5, 32, 64, 9, 2
LEAVES = ("gate_proj", "up_proj", "down_proj")
LAYOUTS = ("SharedOuter", "Shared", "PerExpert")
KINDS = ("LoRA", "OFT")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Layer(nn.Module):
    """Experts behind a router that must see what no adapter has touched."""

    def __init__(self) -> None:
        super().__init__()
        linears = {}
        for index, leaf in enumerate(LEAVES):
            shape = (N, INNER) if leaf == "down_proj" else (INNER, N)
            weights = [int4.quantize(torch.randn(shape, generator=seeded(10 * index + e)) * 0.2, 32) for e in range(E)]
            linears[leaf] = FrozenExpertLinear(stack_experts(weights), reads_tokens=leaf != "down_proj")
        self.experts = FrozenExperts(linears, gated(nn.functional.silu))
        self.router = nn.Parameter(torch.randn(E, N, generator=seeded(7)))
        self.routed: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = (x @ self.router.t()).softmax(-1).topk(TOP)
        self.routed.append(chosen)
        return self.experts(x, chosen, weights)


def tokens(seed: int = 3) -> Tensor:
    return torch.randn(TOKENS, N, generator=seeded(seed), requires_grad=True)


def config_of(kind: str, layout: str, **changes: object) -> AdapterConfig:
    return replace(
        AdapterConfig(kind, LEAVES, rank=4, alpha=8.0, block_size=8, rotation_dtype="F32", experts=layout), **changes
    )


def adapted(kind: str, layout: str, **changes: object) -> tuple[Layer, InjectedAdapter]:
    model = Layer()
    injected = inject(model, LEAVES, config_of(kind, layout, **changes), seed=1)
    move(injected, 2)
    return model, injected


def move(injected: InjectedAdapter, seed: int) -> None:
    """Values that BF16 holds."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in injected.parameters():
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * 0.1).bfloat16())


def dense_twin(model: Layer, injected: InjectedAdapter, x: Tensor, masters: dict[str, Tensor]) -> Tensor:
    """Every token at each of its experts, one by one, with whole weights."""
    config = injected.config
    weights, chosen = (x @ model.router.t()).softmax(-1).topk(TOP)

    def linear(leaf: str, expert: int, x_K: Tensor) -> Tensor:
        w = int4.dequantize(getattr(model.experts, leaf).base.stack.expert(expert), torch.float32)
        name = f"experts.{leaf}"

        def of(kind: str) -> Tensor:
            value = masters[f"{injected.masters.owner[name]}.{kind}" if kind == "oft_R" else f"{name}.{kind}"]
            return value[expert if len(value) > 1 else 0]

        if config.type == "LoRA":
            return w @ x_K + config.scaling * (of("lora_B") @ (of("lora_A") @ x_K))
        R = torch.block_diag(*rotations(of("oft_R"), config.block_size, config.parametrization, config.neumann_terms))
        return w @ (x_K @ R)

    rows = []
    for t in range(len(x)):
        parts = [
            weights[t, c]
            * linear("down_proj", e, nn.functional.silu(linear("gate_proj", e, x[t])) * linear("up_proj", e, x[t]))
            for c, e in enumerate(chosen[t].tolist())
        ]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_a_dense_twin(kind: str, layout: str) -> None:
    model, injected = adapted(kind, layout)
    x, twin_x = tokens(), tokens()
    twin = {name: p.detach().clone().requires_grad_() for name, p in injected.masters.parameters.items()}
    with injected.selection.use("trainer"):
        ours = model(x)
    expected = dense_twin(model, injected, twin_x, twin)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    projection = torch.randn(ours.shape, generator=seeded(4))
    ours.backward(projection)
    expected.backward(projection)
    torch.testing.assert_close(x.grad, twin_x.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in injected.masters.parameters.items():
        torch.testing.assert_close(parameter.grad, twin[name].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_router_sees_the_input_as_it_is(kind: str, layout: str) -> None:
    model, injected = adapted(kind, layout)
    for slot in (None, "trainer"):
        with torch.no_grad(), injected.selection.use(slot):
            model(tokens())
    assert torch.equal(*model.routed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_gives_each_token_what_its_own_slot_gives(kind: str, layout: str) -> None:
    model, injected = adapted(kind, layout, rotation_dtype="BF16")
    for version in (1, 2):
        move(injected, version)
        files = state.export_adapter(injected, injected.config, "base")
        state.load_slot(injected.layers, f"policy-v{version}", files)
    runs = [("policy-v1", 0, 3), (None, 3, 4), ("policy-v2", 4, 8), (None, 8, TOKENS)]
    with torch.no_grad(), injected.selection.use(runs[:3]):
        mixed = model(tokens())
    for slot, start, stop in runs:
        with torch.no_grad(), injected.selection.use(slot):
            alone = model(tokens())
        torch.testing.assert_close(mixed[start:stop], alone[start:stop], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "layout", "expected"),
    [
        ("LoRA", "PerExpert", {f"experts.{e}.{leaf}.lora_{m}" for e in range(E) for leaf in LEAVES for m in "AB"}),
        ("LoRA", "SharedOuter", {f"experts.{w}.lora_{m}" for w in ("w1", "w2", "w3") for m in "AB"}),
        ("OFT", "Shared", {f"experts.{w}.oft_R" for w in ("w1", "w2", "w3")}),
        ("OFT", "PerExpert", {f"experts.{e}.{leaf}.oft_R" for e in range(E) for leaf in LEAVES}),
    ],
)
def test_files_name_experts_as_peft_and_engines_do(kind: str, layout: str, expected: set[str]) -> None:
    from orbit_runtime.adapters.tensorfile import parse

    _, injected = adapted(kind, layout, rotation_dtype="BF16")
    files = state.export_adapter(injected, injected.config, "base")
    tensors = parse(files[MODEL_FILE], where="test")
    assert set(tensors) == {f"base_model.model.{name}.weight" for name in expected}
    if layout == "SharedOuter":
        shapes = {key.removeprefix("base_model.model.experts."): tuple(t.shape) for key, t in tensors.items()}
        assert shapes["w1.lora_A.weight"] == (1, 4, N)
        assert shapes["w1.lora_B.weight"] == (E, INNER, 4)
        assert shapes["w2.lora_A.weight"] == (E, 4, INNER)
        assert shapes["w2.lora_B.weight"] == (1, N, 4)


@pytest.mark.parametrize("layout", [*LAYOUTS, "None"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_size_is_told_before_anything_is_allocated_and_is_right(kind: str, layout: str) -> None:
    told: list[tuple[InjectReport, int]] = []
    model = Layer()
    model.head = nn.Linear(N, N, bias=False)
    config = config_of(kind, layout)

    def announce(report: InjectReport) -> None:
        told.append((report, sum(parameter.requires_grad for parameter in model.parameters())))

    injected = inject(model, (*LEAVES, "head"), config, 1, announce=announce)
    assert told == [(injected.report, 0)]
    assert injected.report.trainable_parameters == sum(p.numel() for p in injected.parameters())
    one = {"gate_proj": (INNER, N), "up_proj": (INNER, N), "down_proj": (N, INNER)}
    if kind == "OFT":
        pairs = {"Shared": N + INNER, "SharedOuter": N + E * INNER, "PerExpert": E * (N + INNER), "None": 0}
        expected = (pairs[layout] + N) * 7 // 2
    else:
        outer = {"gate_proj": N, "up_proj": N, "down_proj": N}
        counts = {
            "Shared": sum(sum(shape) for shape in one.values()),
            "PerExpert": E * sum(sum(shape) for shape in one.values()),
            "SharedOuter": sum(outer[leaf] + E * (sum(shape) - outer[leaf]) for leaf, shape in one.items()),
            "None": 0,
        }
        expected = 4 * (counts[layout] + 2 * N)
    assert injected.report.trainable_parameters == expected
    assert (layout == "None") == (f": {layout}" not in injected.report.text())


def test_a_rank_above_the_layer_s_size_is_refused() -> None:
    with pytest.raises(
        ManifestError, match=r"rank 33 is more than experts.gate_proj has, which is \[64, 32\]"
    ) as caught:
        inject(Layer(), LEAVES, config_of("LoRA", "Shared", rank=33), 1)
    assert "at most 32" in str(caught.value.fix)


def test_rslora_scales_by_the_root_of_the_rank() -> None:
    assert config_of("LoRA", "Shared", rank=16, alpha=8.0, rslora=True).scaling == 2.0
    _, injected = adapted("LoRA", "Shared", rslora=True)
    files = state.export_adapter(injected, injected.config, "base")
    state.load_slot(injected.layers, "policy-v1", files)
    layer = injected.layers["experts.gate_proj"]
    assert layer.slots["policy-v1"].scaling == 8.0 / math.sqrt(4)


def test_dropout_is_drawn_from_its_key_and_only_while_training() -> None:
    model, injected = adapted("LoRA", "SharedOuter", dropout=0.5)
    results = []
    for key in (None, 1, 1, 2):
        with torch.no_grad(), injected.selection.use("trainer", dropout=Dropout(key) if key else None):
            results.append(model(tokens()))
    plain, first, again, other = results
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, plain)
    without, bare = adapted("LoRA", "SharedOuter")
    with torch.no_grad(), bare.selection.use("trainer"):
        assert torch.equal(without(tokens()), plain)


@pytest.mark.parametrize("terms", range(1, 9))
@pytest.mark.parametrize("size", [0.01, 0.1, 0.4])
def test_the_error_bound_of_the_series_holds_and_is_not_idle(terms: int, size: float) -> None:
    parameters = torch.randn(6, 28, generator=seeded(1)) * size / 5
    Q = skew_symmetric(parameters, 8).double()
    identity = torch.eye(8, dtype=torch.float64)
    exact = (identity + Q) @ torch.linalg.inv(identity - Q)
    error = rotations(parameters, 8, "CayleyNeumann", terms).double() - exact
    worst = float(torch.linalg.matrix_norm(error, ord=2).max())
    bound = series_error([parameters], 8, "CayleyNeumann", terms)
    assert worst <= bound + 1e-6
    # A matrix with one plane of rotation reaches the bound.
    plane = torch.zeros(1, 28)
    plane[0, 0] = size
    Q = skew_symmetric(plane, 8).double()
    exact = (identity + Q) @ torch.linalg.inv(identity - Q)
    error = rotations(plane, 8, "CayleyNeumann", terms).double() - exact
    reached = float(torch.linalg.matrix_norm(error, ord=2).max())
    assert reached > 0.8 * series_error([plane], 8, "CayleyNeumann", terms) - 1e-6
    assert series_error([plane], 8, "Cayley", terms) == 0.0


def test_coft_brings_blocks_back_as_peft_does() -> None:
    from peft.tuners.oft.layer import OFTRotationModule

    parameters = torch.randn(4, 28, generator=seeded(1)) * torch.tensor([0.0, 1e-6, 1e-3, 1.0])[:, None]
    module = OFTRotationModule(4, 28, 8, 32)
    expected = module._project_batch(parameters.clone(), eps=1e-4)
    ours = constrained(parameters, 1e-4)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-12)
    assert torch.equal(ours[:2], parameters[:2])
    assert not torch.equal(ours[2:], parameters[2:])


def test_peft_computes_the_same_from_the_files_of_experts_each_with_its_own(tmp_path: Path) -> None:
    """PEFT turns the names of single experts into transformers' fused parameters."""
    import peft
    from transformers import AutoModelForCausalLM

    from orbit_runtime.policy import load_policy
    from orbit_runtime.policy.packed import Branch
    from tests.integration.tiny_families import make_family

    packed, plain = make_family(tmp_path, "qwen3_moe", "BF16")
    config = AdapterConfig("LoRA", ("q_proj", "o_proj", *LEAVES), rank=4, alpha=8.0, experts="PerExpert")
    policy = load_policy(packed, config)
    move(policy.injected, 3)
    ids = torch.randint(2, 120, (12,), generator=seeded(5)).tolist()
    with torch.no_grad(), policy.injected.selection.use("trainer"):
        ours, _ = policy.logprobs(policy.pack([Branch(0, ids[:1], ids[1:])]))
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, data in state.export_adapter(policy.injected, config, "tiny").items():
        (folder / name).write_bytes(data)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs_model = peft.PeftModel.from_pretrained(model, folder)
    with torch.no_grad():
        logits = theirs_model(torch.tensor([ids])).logits[0].log_softmax(-1)
    theirs = logits[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("leaf", [*LEAVES, "gate_up_proj"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_s_name_leads_back_to_layer_and_expert(layout: str, leaf: str) -> None:
    layer = f"model.layers.3.mlp.experts.{leaf}"
    modules = [name.removesuffix(".lora_A") for name in expert_file_names(layer, "lora_A", layout, E)]
    found = [layer_of(module, is_stacked=layout != "PerExpert") for module in modules]
    assert found == ([(layer, index) for index in range(E)] if layout == "PerExpert" else [(layer, None)])


def test_a_dense_layer_s_name_in_a_file_is_its_own() -> None:
    for module in ("model.layers.3.mlp.shared_experts.up_proj", "model.layers.3.self_attn.q_proj", "experts.w1"):
        assert layer_of(module, is_stacked=False) == (module, None)
