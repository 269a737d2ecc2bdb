"""What injection matches, creates, reports and refuses; and what a selection applies to which rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from orbit_runtime.adapters import state
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.inject import InjectedAdapter, inject
from orbit_runtime.adapters.layer import AdaptedLinear
from orbit_runtime.errors import InternalError, ManifestError
from orbit_runtime.quant import int4
from orbit_runtime.quant.linear import FrozenLinear

ALL = ("q_proj", "k_proj", "v_proj", "o_proj")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(8)
        for name in ALL:
            setattr(self, name, FrozenLinear(int4.quantize(torch.randn(32, 32, generator=generator) * 0.2, 32)))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(torch.tanh(self.q_proj(x)) * self.k_proj(x) + self.v_proj(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.lm_head = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def config_of(kind: str, targets: tuple[str, ...] = ALL) -> AdapterConfig:
    return AdapterConfig(kind, targets, rank=4, alpha=8.0, block_size=8)


def adapted(kind: str) -> tuple[Model, InjectedAdapter]:
    model, config = Model(), config_of(kind)
    injected = inject(model, ALL, config, 3)
    for version in (1, 2):
        moved(injected, version)
        state.load_slot(injected.layers, f"policy-v{version}", state.export_adapter(injected, config, "base"))
    return model, injected


def moved(injected: InjectedAdapter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in injected.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(6))


def output(model: Model, injected: InjectedAdapter, segments: object, x: Tensor = X) -> Tensor:
    with torch.no_grad(), injected.selection.use(segments):
        return model(x)


@pytest.mark.parametrize("kind", ["LoRA", "OFT"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_mixed_batch_gives_each_row_what_its_own_slot_gives(kind: str, grad: bool) -> None:
    model, injected = adapted(kind)
    segments = [("policy-v1", 0, 3), (None, 3, 5), ("policy-v2", 5, 9)]
    with torch.set_grad_enabled(grad), injected.selection.use(segments):
        mixed = model(X).flatten(0, 1)
    runs = [("policy-v1", 0, 3), (None, 3, 5), ("policy-v2", 5, 9), (None, 9, 10)]
    for slot, start, stop in runs:
        alone = output(model, injected, slot).flatten(0, 1)
        torch.testing.assert_close(mixed[start:stop], alone[start:stop], rtol=1e-5, atol=1e-6)
    assert not torch.equal(output(model, injected, "policy-v1"), output(model, injected, "policy-v2"))


@pytest.mark.parametrize("kind", ["LoRA", "OFT"])
def test_the_base_is_called_once_for_all_rows(kind: str) -> None:
    model, injected = adapted(kind)
    calls: list[str] = []
    for name, layer in injected.layers.items():
        layer.base.register_forward_hook(lambda *_, name=name: calls.append(name))
    output(model, injected, [("policy-v1", 0, 3), ("policy-v2", 3, 10)])
    assert sorted(calls) == sorted(injected.layers)


@pytest.mark.parametrize("kind", ["LoRA", "OFT"])
def test_a_fresh_adapter_changes_nothing(kind: str) -> None:
    model = Model()
    before = model(X)
    injected = inject(model, ALL, config_of(kind), 3)
    assert torch.equal(output(model, injected, None), before)
    torch.testing.assert_close(output(model, injected, "trainer"), before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["LoRA", "OFT"])
def test_gradients_reach_every_parameter_and_nothing_else(kind: str) -> None:
    model, injected = adapted(kind)
    with injected.selection.use("trainer"):
        model(X).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in injected.parameters())
    trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert trainable == {id(parameter) for parameter in injected.parameters()}


@pytest.mark.parametrize("kind", ["LoRA", "OFT"])
def test_the_gradient_passes_the_rounding_straight_through(kind: str) -> None:
    """Masters that differ below BF16's resolution give the same output bit for bit, and the same gradient.

    LoRA's gradient depends on the rounded values alone. OFT's also passes through the linear solve that builds R, at
    the unrounded masters: a solve is accurate relative to its largest entry, so entries that cancel are held to that.
    """
    model, injected = adapted(kind)
    results = []
    for nudge in (0.0, 1e-9):
        with torch.no_grad():
            for parameter in injected.parameters():
                parameter.grad = None
                parameter += nudge
        with injected.selection.use("trainer"):
            y = model(X)
        y.square().sum().backward()
        results.append((y.detach(), injected.parameters()[-1].grad.clone()))
    assert torch.equal(results[0][0], results[1][0])
    tolerance = 0.0 if kind == "LoRA" else 1e-6 * results[0][1].abs().max().item()
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0.0, atol=tolerance)
    assert not torch.equal(results[0][1], results[0][1].bfloat16().float())


def test_contexts_nest_and_end_as_they_began() -> None:
    model, injected = adapted("LoRA")
    base = output(model, injected, None)
    with torch.no_grad(), injected.selection.use("trainer"):
        trained = model(X)
        with injected.selection.use(None):
            assert torch.equal(model(X), base)
        assert torch.equal(model(X), trained)
    assert torch.equal(model(X), base)


def test_segments_that_overlap_or_overrun_are_refused() -> None:
    model, injected = adapted("LoRA")
    with pytest.raises(InternalError, match="in order and disjoint"):
        output(model, injected, [("policy-v1", 0, 4), ("policy-v2", 3, 5)])
    with pytest.raises(InternalError, match="row 11 of 10"):
        output(model, injected, [("policy-v1", 0, 11)])
    with pytest.raises(InternalError, match="policy-v9"):
        output(model, injected, "policy-v9")


def test_projections_that_share_an_input_share_one_rotation() -> None:
    _, injected = adapted("OFT")
    layers = injected.layers
    assert layers["layers.0.q_proj"].oft_R is layers["layers.0.v_proj"].oft_R
    assert layers["layers.0.q_proj"].oft_R is not layers["layers.1.q_proj"].oft_R
    assert sorted(injected.masters.parameters) == [
        f"layers.{layer}.{name}.oft_R" for layer in (0, 1) for name in ("o_proj", "q_proj")
    ]


def test_a_rotated_input_is_reused_for_that_input_only() -> None:
    _, injected = adapted("OFT")
    q, k = injected.layers["layers.0.q_proj"], injected.layers["layers.0.k_proj"]
    # Copies have seen equally many changes in place, so only which tensor it is tells them apart.
    first, other = X.clone(), (-X).clone()
    with torch.no_grad(), injected.selection.use("policy-v1"):
        k_alone = k(other)
    with torch.no_grad(), injected.selection.use("policy-v1"):
        q(first)
        assert torch.equal(k(other), k_alone)
        changed = X.clone()
        q(changed)
        changed.neg_()
        assert torch.equal(k(changed), k_alone)


def test_the_report_counts_layers_shapes_and_parameters() -> None:
    lora = inject(Model(), ALL, config_of("LoRA"), 3).report
    assert lora.trainable_parameters == 8 * (4 * 32 + 32 * 4)
    assert (lora.rows[0].target, lora.rows[0].count, lora.rows[0].shapes) == ("q_proj", 2, (((32, 32), 2),))
    oft = inject(Model(), ALL, config_of("OFT"), 3).report
    assert oft.trainable_parameters == 2 * 2 * (32 // 8) * (8 * 7 // 2)
    assert [row.parameters for row in oft.rows] == [224, 0, 0, 224]
    assert "trainable" in oft.text()


def test_initial_values_depend_on_seed_and_name_only() -> None:
    first = inject(Model(), ALL, config_of("LoRA"), 3)
    again = inject(Model(), ALL[2:], config_of("LoRA"), 3)
    other = inject(Model(), ALL, config_of("LoRA"), 4)
    key = "layers.1.v_proj.lora_A"
    assert torch.equal(first.masters.parameters[key], again.masters.parameters[key])
    assert not torch.equal(first.masters.parameters[key], other.masters.parameters[key])
    assert first.masters.parameters[key].abs().max() <= 32**-0.5
    assert not first.masters.parameters["layers.1.v_proj.lora_B"].any()


def test_a_target_that_matches_nothing_is_an_error_with_near_names() -> None:
    with pytest.raises(ManifestError, match=r"spec\.adapter\.targets.*'qproj'(.|\n)*q_proj"):
        inject(Model(), ("qproj",), config_of("LoRA"), 3)
    with pytest.raises(ManifestError, match="2 adapter targets") as caught:
        inject(Model(), ("qproj", "o_proj", "dense"), config_of("LoRA"), 3)
    assert len(caught.value.problems) == 2


def test_a_target_matches_at_a_dot_and_the_head_only_by_name() -> None:
    with pytest.raises(ManifestError, match="'proj'"):
        inject(Model(), ("proj",), config_of("LoRA"), 3)
    named = inject(Model(), ("0.q_proj", "lm_head"), config_of("LoRA"), 3)
    assert list(named.layers) == ["layers.0.q_proj", "lm_head"]


def test_a_block_size_that_does_not_divide_names_the_module_and_sizes_that_do() -> None:
    config = AdapterConfig("OFT", ALL, block_size=12)
    model = Model()
    with pytest.raises(ManifestError, match=r"layers\.0\.q_proj(.|\n)*use 8 or 16"):
        inject(model, ALL, config, 3)
    assert not any(isinstance(module, AdaptedLinear) for module in model.modules())


def test_a_model_takes_one_adapter() -> None:
    model, _ = adapted("LoRA")
    with pytest.raises(InternalError, match="already has an adapter"):
        inject(model, ALL, config_of("LoRA"), 3)
