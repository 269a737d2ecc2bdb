"""The policy against transformers: values, packing, streaming, gradients, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.errors import ManifestError, ModelError, UnsupportedError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.policy import load_policy
from orbit_runtime.policy.logprobs import token_logprobs
from orbit_runtime.policy.packed import Branch
from orbit_runtime.quant import int4
from orbit_runtime.quant.linear import FrozenLinear
from orbit_runtime.types import Sampling
from tests.integration.tiny_models import ARCHITECTURES, TARGETS, load_reference, make_checkpoint, reference_logprobs

LORA = AdapterConfig(type="LoRA", targets=TARGETS, rank=4, alpha=8.0)


def tokens_of(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 120, (count,), generator=generator).tolist()


@pytest.mark.parametrize("kernel", ["SDPA", "Eager"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_logprobs_of_packed_sequences_equal_transformers(tmp_path: Path, architecture: str, kernel: str) -> None:
    folder = make_checkpoint(tmp_path, architecture)
    policy = load_policy(folder, LORA, kernel=kernel)
    sequences = [tokens_of(count, count) for count in (5, 17, 9, 3)]
    cuts = (2, 4, 8, 1)
    with torch.no_grad():
        batch = policy.pack([Branch(i, s[:c], s[c:]) for i, (s, c) in enumerate(zip(sequences, cuts, strict=True))])
        ours, _ = policy.logprobs(batch)
    model = load_reference(folder)
    theirs = torch.cat([reference_logprobs(model, s)[c - 1 :] for s, c in zip(sequences, cuts, strict=True)])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_answers_that_share_a_prompt_equal_answers_computed_alone(tmp_path: Path) -> None:
    policy = load_policy(make_checkpoint(tmp_path, "qwen3"), LORA)
    prompt = tokens_of(7, 1)
    answers = [tokens_of(count, 10 + count) for count in (1, 2, 5, 30, 3)]
    with torch.no_grad():
        together, _ = policy.logprobs(policy.pack([Branch(0, prompt, answer) for answer in answers]))
        alone = [policy.logprobs(policy.pack([Branch(0, prompt, answer)]))[0] for answer in answers]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)
    assert len(policy.pack([Branch(0, prompt, answer) for answer in answers]).token_ids_T) == 7 + 0 + 1 + 4 + 29 + 2


def test_changing_one_packed_sequence_leaves_the_others_bits_alone(tmp_path: Path) -> None:
    policy = load_policy(make_checkpoint(tmp_path, "llama"), LORA)
    first, second, other = tokens_of(12, 1), tokens_of(12, 2), tokens_of(12, 3)
    with torch.no_grad():
        before, _ = policy.logprobs(policy.pack([Branch(0, first[:4], first[4:]), Branch(1, second[:4], second[4:])]))
        after, _ = policy.logprobs(policy.pack([Branch(0, first[:4], first[4:]), Branch(1, other[:4], other[4:])]))
    assert torch.equal(before[:8], after[:8])
    assert not torch.equal(before[8:], after[8:])


@pytest.mark.parametrize("top_p", [1.0, 0.7])
@pytest.mark.parametrize("read", ["log-probs", "entropies", "both"])
def test_chunked_logprobs_entropies_and_their_gradient_equal_the_dense_ones(top_p: float, read: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 16, generator=generator, dtype=torch.float64).float().requires_grad_(True)
    weight = torch.randn(50, 16, generator=generator) * 0.3
    targets = torch.randint(0, 50, (11,), generator=generator)
    logprobs, entropies = token_logprobs(
        hidden,
        targets,
        lambda h: h @ weight.T,
        vocabulary=50,
        sampling=Sampling(temperature=0.7, top_p=top_p),
        chunk_elements=150,
    )
    weights = torch.arange(1.0, 12.0)
    parts = {"log-probs": (1.0, 0.0), "entropies": (0.0, 1.0), "both": (1.0, -0.3)}[read]
    sum(
        part * (each * weights).sum() for part, each in zip(parts, (logprobs, entropies), strict=True) if part
    ).backward()
    ours = hidden.grad.clone()
    exact = hidden.detach().double().requires_grad_(True)
    logits = exact @ weight.double().T / 0.7
    if top_p < 1:
        probs, order = logits.softmax(-1).sort(-1, descending=True)
        kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, probs.cumsum(-1) - probs < top_p)
        kept[torch.arange(11), targets] = True
        logits = logits.masked_fill(~kept, float("-inf"))
    dense = logits.log_softmax(-1)
    entropy = -(dense.exp() * dense.masked_fill(dense == float("-inf"), 0)).sum(-1)
    expected = dense.gather(1, targets[:, None])[:, 0]
    (parts[0] * (expected * weights).sum() + parts[1] * (entropy * weights).sum()).backward()
    torch.testing.assert_close(logprobs, expected.float(), rtol=0, atol=2e-6)
    torch.testing.assert_close(entropies, entropy.detach().float(), rtol=0, atol=2e-6)
    torch.testing.assert_close(ours, exact.grad.float(), rtol=1e-5, atol=2e-6)


def test_no_logits_outlive_their_chunk_in_either_pass() -> None:
    """Every tensor with a column per token of the vocabulary, seen by the dispatcher; none is kept for backward."""
    vocabulary, rows = 64, 4
    largest: list[int] = []
    kept: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple | list) else (out,):
                if isinstance(each, torch.Tensor) and each.dim() == 2 and each.shape[-1] == vocabulary:
                    largest.append(each.shape[0])
            return out

    head_VN = torch.randn(vocabulary, 3)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.shape[-1]), t)[1], lambda t: t)
    for count in (16, 160):
        hidden, targets = torch.randn(count, 3, requires_grad=True), torch.randint(vocabulary, (count,))
        with Watch():
            with hooks:
                logprobs, _ = token_logprobs(
                    hidden, targets, lambda states: states @ head_VN.T, vocabulary=vocabulary,
                    chunk_elements=rows * vocabulary,
                )  # fmt: skip
            logprobs.sum().backward()
    assert 0 < max(largest) <= rows
    assert kept
    assert vocabulary not in kept, "hidden states and targets are kept, and no logits"


def test_int4_base_equals_transformers_over_the_codecs_own_values() -> None:
    folder = builtin_folder("tiny-adder", "INT4")
    policy = load_policy(folder, LORA, precision="INT4")
    model = load_reference(builtin_folder("tiny-adder", "BF16"))
    layers = dict(policy.injected.layers)
    with torch.no_grad():
        for name, layer in layers.items():
            assert isinstance(layer.base, FrozenLinear)
            model.get_submodule(name).weight.copy_(int4.dequantize(layer.base.packed).float())
        for name, parameter in model.named_parameters():
            if name.removesuffix(".weight") not in layers and "norm" in name:
                parameter.copy_(policy.model.get_parameter(name))
        model.get_input_embeddings().weight.copy_(policy.model.get_input_embeddings().weight.float())
        tokens = tokens_of(20, 5)
        tokens = [token % 40 for token in tokens]
        ours, _ = policy.logprobs(policy.pack([Branch(0, tokens[:1], tokens[1:])]))
    torch.testing.assert_close(ours, reference_logprobs(model, tokens), rtol=0, atol=2e-5)


def test_gradient_of_the_adapter_equals_autograd_through_transformers_modules(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    policy = load_policy(folder, LORA)
    masters = policy.injected.masters.parameters
    with torch.no_grad():
        for index, parameter in enumerate(masters.values()):
            generator = torch.Generator().manual_seed(index)
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul(0.1).bfloat16())
    tokens = tokens_of(14, 7)
    with policy.injected.selection.use(TRAINER_SLOT):
        ours, _ = policy.logprobs(policy.pack([Branch(0, tokens[:3], tokens[3:])]))
    ours.sum().backward()
    model = load_reference(folder)
    merged = {}
    for name in policy.injected.layers:
        a = masters[f"{name}.lora_A"].detach().clone().requires_grad_(True)
        b = masters[f"{name}.lora_B"].detach().clone().requires_grad_(True)
        merged[name] = (a, b)
    weights = {
        f"{name}.weight": model.get_submodule(name).weight.detach() + 2.0 * (b @ a) for name, (a, b) in merged.items()
    }
    logits = torch.func.functional_call(model, weights, (torch.tensor([tokens]),)).logits[0].log_softmax(-1)
    logits[2:-1].gather(1, torch.tensor(tokens)[3:, None]).sum().backward()
    for name, (a, b) in merged.items():
        torch.testing.assert_close(masters[f"{name}.lora_A"].grad, a.grad, rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(masters[f"{name}.lora_B"].grad, b.grad, rtol=2e-4, atol=2e-4)


def test_a_sharded_checkpoint_is_the_same_policy_as_one_file(tmp_path: Path) -> None:
    whole = load_policy(make_checkpoint(tmp_path / "one", "llama"), LORA)
    sharded_folder = make_checkpoint(tmp_path / "many", "llama", max_shard_size="60KB")
    assert len(list(sharded_folder.glob("*.safetensors"))) > 2
    assert whole.base_digest() == load_policy(sharded_folder, LORA).base_digest()
    narrow = load_policy(sharded_folder, LORA, compute_dtype=torch.bfloat16)
    assert narrow.base_digest() == whole.base_digest(), "a run may go on where activations are BF16"


def test_the_base_gets_no_gradient_and_keeps_its_digest(tmp_path: Path) -> None:
    policy = load_policy(make_checkpoint(tmp_path, "qwen3"), LORA)
    before = policy.base_digest()
    tokens = tokens_of(10, 3)
    with policy.injected.selection.use(TRAINER_SLOT):
        logprobs, _ = policy.logprobs(policy.pack([Branch(0, tokens[:2], tokens[2:])]))
    logprobs.sum().backward()
    trained = {id(parameter) for parameter in policy.injected.parameters()}
    assert all(parameter.grad is None for parameter in policy.model.parameters() if id(parameter) not in trained)
    assert policy.base_digest() == before
    with torch.no_grad():
        policy.model.get_output_embeddings().packed.qdata[0, 0] += 1
    assert policy.base_digest() != before


def test_loading_never_holds_more_than_the_base_and_one_layer(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    allocated: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.device.type == "cpu":
                allocated.append(out.untyped_storage().nbytes())
            return out

    with Watch():
        policy = load_policy(folder, LORA)
    tensors = (*policy.model.parameters(), *policy.model.buffers())
    frozen = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if not tensor.requires_grad}
    assert sum(frozen.values()) <= stored * 1.1
    layer = policy.model.model.layers[0]
    in_bf16 = 2 * sum(m.in_features * m.out_features for m in layer.modules() if isinstance(m, FrozenLinear))
    assert max(allocated) <= in_bf16


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ("no config", ModelError, "config.json"),
        ("no tensor", ModelError, "lm_head.weight"),
        ("extra tensor", ModelError, "stray.weight"),
        ("wrong precision", ManifestError, "BF16"),
        ("unknown quantisation", ModelError, "bitsandbytes"),
        ("unknown model type", UnsupportedError, "transformers cannot build"),
        ("truncated", ModelError, "model.safetensors"),
        ("missing folder", ModelError, "does not exist"),
    ],
)
def test_a_broken_model_folder_is_refused_by_name(tmp_path: Path, change: str, error: type, words: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(tmp_path / "model", "llama")
    config_path, weights = folder / "config.json", folder / "model.safetensors"
    config = json.loads(config_path.read_text())
    precision = "Auto"
    if change == "no config":
        config_path.unlink()
    elif change in ("no tensor", "extra tensor"):
        tensors = load_file(weights)
        if change == "no tensor":
            del tensors["lm_head.weight"]
        else:
            tensors["stray.weight"] = torch.zeros(2)
        save_file(tensors, weights)
    elif change == "wrong precision":
        precision = "INT4"
    elif change == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif change == "missing folder":
        folder = tmp_path / "nowhere"
    else:
        extra = {
            "unknown quantisation": {"quantization_config": {"quant_method": "bitsandbytes"}},
            "unknown model type": {"model_type": "no_such_model"},
        }[change]
        config_path.write_text(json.dumps(config | extra))
    with pytest.raises(error) as caught:
        load_policy(folder, LORA, precision=precision)
    assert words in str(caught.value)


def test_an_output_layer_with_another_name_is_told_by_it_and_not_as_a_download_to_repeat(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    held = load_file(folder / "model.safetensors")
    held["embed_out.weight"] = held.pop("lm_head.weight")
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"output layer is embed_out\.weight, .* called lm_head\.weight") as caught:
        load_policy(folder, LORA)
    assert caught.value.exit_code == 66
    assert "download the model again" not in str(caught.value)


def test_a_model_without_any_output_layer_is_told_what_is_missing(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    held = load_file(folder / "model.safetensors")
    assert held.pop("lm_head.weight", None) is not None
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no output layer lm_head\.weight, and config.json does not tie it"):
        load_policy(folder, LORA)
