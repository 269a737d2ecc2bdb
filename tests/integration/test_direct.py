"""Orbit's own way through models of the Llama form, against the model's modules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from orbit_runtime.adapters import state
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.direct import FORMS
from orbit_runtime.policy.load import widen
from orbit_runtime.policy.packed import Branch, PackedPlan
from orbit_runtime.quant.linear import FrozenLinear
from orbit_runtime.rollout.cache import DecodePlan, KVCache
from tests.integration.tiny_models import ARCHITECTURES, TARGETS, make_checkpoint

LORA = AdapterConfig(type="LoRA", targets=TARGETS, rank=4, alpha=8.0)
OFT = AdapterConfig(type="OFT", targets=TARGETS, block_size=16)
SOME = AdapterConfig(type="OFT", targets=("q_proj", "down_proj"), block_size=16)
PROMPTS = ((3, 9, 27, 81), (5, 6), (7, 8, 9, 10, 11, 12, 13))


def with_slots(policy: Policy, config: AdapterConfig) -> Policy:
    """Two slots of different values, read from published bytes as an engine reads them."""
    generator = torch.Generator().manual_seed(7)
    for name in ("policy-v1", "policy-v2"):
        for master in policy.injected.parameters():
            with torch.no_grad():
                master.copy_(torch.randn(master.shape, generator=generator) * 0.1)
        state.load_slot(policy.injected.layers, name, state.export_adapter(policy.injected, config, "base"))
    return policy


def hidden_by(policy: Policy, selection: object, direct: bool) -> torch.Tensor:
    """Hidden states of a prefill and of one decode step at unequal and at equal positions."""
    way = policy.direct if direct else None
    batch = policy.pack([Branch(index, prompt, (0,)) for index, prompt in enumerate(PROMPTS)])
    results = []
    with torch.no_grad():
        plan = PackedPlan(batch, "SDPA", capture=True)
        with policy.injected.selection.use(selection):  # type: ignore[arg-type]
            results.append(run(policy, way, batch.token_ids_T, batch.position_T, plan))
        lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
        starts = torch.tensor(np.cumsum([0, *(len(prompt) for prompt in PROMPTS)])[:-1])
        for positions in ([4, 2, 7], [7, 7, 7]):
            cache = KVCache()
            cache.reserve(5, 16, live=0)
            assert plan.captured is not None
            cache.write_prompts(0, torch.arange(3), starts, lengths, plan.captured)
            for kernel in ("Eager", "SDPA"):
                step = DecodePlan(cache, np.array(positions), kernel)  # type: ignore[arg-type]
                rows = [(name, *(row for row in span)) for name, span in zip(names(selection), ROWS, strict=True)]
                with policy.injected.selection.use(rows if isinstance(selection, list) else selection):  # type: ignore[arg-type]
                    results.append(run(policy, way, torch.tensor([20, 21, 22]), torch.tensor(positions), step))
    return torch.cat(results)


ROWS = ((0, 1), (1, 2), (2, 3))


def names(selection: object) -> list[str | None]:
    return [entry[0] for entry in selection] if isinstance(selection, list) else [None, None, None]


def run(policy: Policy, way: object, tokens: torch.Tensor, positions: torch.Tensor, plan: object) -> torch.Tensor:
    if way is not None:
        return policy.sampled_hidden(tokens, positions, plan)  # type: ignore[arg-type]
    return policy.hidden(tokens.view(plan.layout), positions.view(plan.layout), plan).flatten(0, 1)  # type: ignore[attr-defined,arg-type]


@pytest.mark.parametrize("config", [LORA, OFT, SOME], ids=["lora", "oft", "oft-on-some"])
@pytest.mark.parametrize("architecture", sorted(set(FORMS) & set(ARCHITECTURES)))
def test_hidden_states_equal_those_of_the_models_modules(
    tmp_path: Path, architecture: str, config: AdapterConfig
) -> None:
    policy = with_slots(load_policy(make_checkpoint(tmp_path, architecture), config), config)
    assert policy.direct is not None
    mixed = [("policy-v1", 0, 4), (None, 4, 6), ("policy-v2", 6, 13)]
    seen = []
    for selection in (None, "policy-v1", mixed):
        direct = hidden_by(policy, selection, True)
        torch.testing.assert_close(direct, hidden_by(policy, selection, False), rtol=1e-5, atol=1e-5)
        seen.append(direct)
    assert all((a - b).abs().max() > 1e-3 for a, b in ((seen[0], seen[1]), (seen[1], seen[2])))


def test_shared_rows_stand_in_memory_once_and_keep_every_bit(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    policy = load_policy(folder, LORA)
    attention = policy.model.model.layers[0].self_attn
    bases: list[FrozenLinear] = [attention.q_proj.base, attention.k_proj.base, attention.v_proj.base]
    storages = {base.packed.qdata.untyped_storage().data_ptr() for base in bases}
    assert len(storages) == 1
    from safetensors.torch import load_file

    stored = load_file(str(next(folder.glob("*.safetensors"))))
    for name, base in zip(("q_proj", "k_proj", "v_proj"), bases, strict=True):
        assert torch.equal(base.packed.qdata, stored[f"model.layers.0.self_attn.{name}.weight"])


class _Casts(TorchDispatchMode):
    """Notes the sizes of BF16 tensors that are cast to fp32 or copied into fp32 memory."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        source = args[1] if func.overloadpacket is torch.ops.aten.copy_ else args[0] if args else None
        dtypes = [each.dtype for each in (source, found) if isinstance(each, torch.Tensor)]
        if dtypes == [torch.bfloat16, torch.float32]:
            self.sizes.append(source.numel())
        return found


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "olmo2"])
def test_widened_linears_are_the_same_base_and_give_the_same_bits_without_a_cast(
    tmp_path: Path, architecture: str
) -> None:
    folder = make_checkpoint(tmp_path, architecture)
    stored, wide = (with_slots(each(load_policy(folder, LORA)), LORA) for each in (lambda policy: policy, widen))
    assert wide.base_digest() == stored.base_digest()
    smallest, casts = min(base.packed.qdata.numel() for base in bases_of(wide)), []
    for policy in (stored, wide):
        with _Casts() as seen:
            found = hidden_by(policy, "policy-v1", policy.direct is not None)
            logits, logprobs = policy.head(found), logprobs_of(policy)
        casts.append(max(seen.sizes, default=0) >= smallest)
        if policy is stored:
            expected = (found, logits, logprobs)
    assert all(map(torch.equal, (found, logits, logprobs), expected))
    assert casts == [True, False]
    # A model whose embedding is its output layer still holds the two once.
    head, table = wide.model.get_output_embeddings(), wide.model.get_input_embeddings()
    assert (head.packed.qdata.data_ptr() == table.weight.data_ptr()) is (architecture == "qwen3")
    with torch.no_grad():
        bases_of(wide)[0].packed.qdata.view(torch.int32)[0, 0] ^= 1
    assert wide.base_digest() != stored.base_digest()


@pytest.mark.parametrize("precision", ["INT4", "NVFP4"])
def test_a_dense_copy_is_the_same_base_until_a_bit_of_it_changes(precision: str) -> None:
    folder = builtin_folder("tiny-adder", precision)
    stored, wide = (with_slots(each(load_policy(folder, LORA)), LORA) for each in (lambda policy: policy, widen))
    found, expected = ((hidden_by(each, "policy-v1", True), logprobs_of(each)) for each in (wide, stored))
    assert all(map(torch.equal, found, expected))
    assert wide.base_digest() == stored.base_digest()
    bases_of(wide)[0].views()[0].view(torch.int32)[0, 0] ^= 1
    assert wide.base_digest() != stored.base_digest()


def bases_of(policy: Policy) -> list[FrozenLinear]:
    return [module for module in policy.model.modules() if isinstance(module, FrozenLinear)]


def logprobs_of(policy: Policy) -> torch.Tensor:
    """A trainer's pass, with its gradient's graph."""
    with policy.injected.selection.use(TRAINER_SLOT):
        return policy.logprobs(policy.pack([Branch(0, PROMPTS[0], PROMPTS[2]), Branch(1, PROMPTS[2], (4, 5))]))[0]


def test_another_form_goes_through_its_modules(tmp_path: Path) -> None:
    for architecture in sorted(set(ARCHITECTURES) - set(FORMS)):
        assert load_policy(make_checkpoint(tmp_path / architecture, architecture), LORA).direct is None


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2"])
def test_in_bf16_it_is_as_close_to_fp32_as_the_modules_are(tmp_path: Path, architecture: str) -> None:
    folder = make_checkpoint(tmp_path, architecture)
    exact, policy = (
        with_slots(load_policy(folder, LORA, compute_dtype=each), LORA) for each in (torch.float32, torch.bfloat16)
    )
    wide = with_slots(widen(load_policy(folder, LORA, compute_dtype=torch.bfloat16)), LORA)
    right = hidden_by(exact, "policy-v1", False)
    by_modules, direct, ordered = (
        hidden_by(each, "policy-v1", is_direct).float()
        for each, is_direct in ((policy, False), (policy, True), (wide, True))
    )
    assert (direct - right).norm() <= 1.25 * (by_modules - right).norm()
    assert (ordered - right).norm() <= 1.25 * (by_modules - right).norm()
    assert wide.base_digest() == policy.base_digest() == exact.base_digest()
    assert wide.direct is not None
    for number, (_, shared) in enumerate(wide.direct.shared()[:4]):
        weight = shared.views()[0].view(torch.int16)
        assert shared.ordered is not None, number
        weight[0, 0] ^= 1
        shared.order()
        weight[0, 0] ^= 1
        assert wide.base_digest() != exact.base_digest(), number
        shared.order()


@pytest.mark.parametrize("targets", [TARGETS, ("q_proj", "down_proj")], ids=["all", "some"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gradients_equal_those_of_autograd_through_the_models_modules(
    tmp_path: Path, architecture: str, targets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = AdapterConfig(type="LoRA", targets=targets, rank=4, alpha=8.0)
    policy = with_slots(load_policy(make_checkpoint(tmp_path, architecture), lora), lora)
    found = []
    for direct in (True, False):
        monkeypatch.setattr(Policy, "_passes_directly", direct)
        (logprobs_of(policy) * torch.linspace(-1, 1, 9)).sum().backward()
        found.append([master.grad for master in policy.injected.parameters()])
        for master in policy.injected.parameters():
            master.grad = None
    for grad, expected in zip(*found, strict=True):
        assert grad is not None
        torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("config", [LORA, OFT, SOME], ids=["lora", "oft", "oft-on-some"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_pass_in_bf16_with_gradients_has_the_bits_of_one_without(
    tmp_path: Path, architecture: str, config: AdapterConfig
) -> None:
    folder = make_checkpoint(tmp_path, architecture)
    policy = with_slots(widen(load_policy(folder, config, compute_dtype=torch.bfloat16)), config)
    recorded = logprobs_of(policy)
    with torch.no_grad():
        assert torch.equal(logprobs_of(policy), recorded)
    recorded.sum().backward()
    exact = with_slots(load_policy(folder, config), config)
    logprobs_of(exact).sum().backward()
    near, far = (
        torch.cat([master.grad.flatten() for master in each.injected.parameters()])  # type: ignore[union-attr]
        for each in (policy, exact)
    )
    assert float((near - far).norm() / far.norm()) < 0.03
