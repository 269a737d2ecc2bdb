"""Elements per token that a pass keeps for its backward pass, and that are alive within one layer.

Belongs here: counting elements. Does not belong here: bytes, layouts (`parts`).

What layers add to is fp32 also where passes compute in BF16, and counts as two elements there.

Without recomputation, a layer of the torch trainer keeps per token: the input of both norms; the input of each adapted
product; queries, keys, values and the result of attention as its kernel received them; queries and keys before their
norm; gate, up and the activated gate. Where matrices are divided among ranks, tokens are too, outside of attention and
of feed-forward parts. Inside, a rank has all tokens: what undivided matrices write, and what reads that, is whole on
each rank; what divided ones write is a part. The tokens that enter are gathered again for the backward pass, so a rank
keeps its own, unless they come from further ranks (`token_sets`) or the layer is computed again. `policy.recompute`
says what is kept with recomputation. Tests compare the sums
with what autograd and the recomputation hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Literal

from orbit_runtime.model_info.weights import Architecture, Weight
from orbit_runtime.planner.adapter_size import DIVIDED, cut_shape, faces_outside
from orbit_runtime.planner.job import Job

QUERY_SOURCES = ("o_proj", "o_a_proj", "o_b_proj")
KEYS_AND_VALUES = ("k_proj", "v_proj", "kv_proj", "kv_b_proj")
GATED = ("gate_proj", "up_proj", "gate_up_proj")


Recompute = Literal["None", "Selective", "PerLayer"]


def saved_elements(
    model: Architecture, job: Job, recompute: Recompute, tensor: int = 1, token_sets: int = 1, *, stream: float = 1.0
) -> float:
    """Elements kept by all layers and the head between the forward and the backward pass.

    Args:
        stream: elements that one fp32 value counts as.
        tensor: into how many parts matrices are divided: those of one rank are counted.
        token_sets: number of ranks whose tokens meet before a layer's experts.
    """
    answer = job.spec.new_tokens / job.spec.model.max_sequence_length
    total = model.hidden_size * (stream + answer) / tensor
    if recompute != "None":
        # Layers that are computed again share the masks of all of them, a byte for each of their elements.
        total += _mask_elements(job) / 2
    for number, layer in enumerate(_layers(model)):
        if recompute == "None":
            total += _layer_saved(layer, model, job, tensor, token_sets, stream)
            continue
        # The first one is kept as the embedding gives it.
        total += (stream if number else 1.0) * model.hidden_size * model.streams / tensor
        if recompute == "Selective":
            total += _attention_kept(layer, tensor) if job.attention == "Chunked" else 0
            total += sum(
                _times(w, model) * _cut(w, tensor)[0] for w in layer if w.is_linear and not _is_of_experts_down(w)
            )
    return total


def recomputed_elements(
    model: Architecture, job: Job, recompute: Recompute, tensor: int = 1, *, stream: float = 1.0
) -> float:
    """Elements that the widest layer holds while it is recomputed: those that it would have kept."""
    if recompute == "None":
        return 0.0
    return max((_layer_saved(layer, model, job, tensor, None, stream) for layer in _layers(model)), default=0.0)


def _layer_saved(
    layer: list[Weight], model: Architecture, job: Job, tensor: int, token_sets: int | None, stream: float
) -> float:
    """Elements that one layer keeps without recomputation.

    Args:
        token_sets: None: what enters is kept as it was gathered.
    """
    gathered, mask = key_copies(job), _mask_elements(job)
    total = 2 * stream * model.hidden_size * model.streams / tensor + mask
    if job.spec.adapter.type == "Full":
        # For both norms: the input, and the normalised value that the weights multiply.
        total += 4 * stream * model.hidden_size
    return total + sum(_saved(weights, model, job, gathered, tensor, token_sets) for weights in _by_experts(layer))


def _mask_elements(job: Job) -> float:
    """Masks are as large as the products; for a prompt alone, only the explicit products need a mask."""
    if job.attention == "Chunked":
        return 0.0
    prompt = job.spec.model.max_sequence_length - job.spec.new_tokens
    masked = job.spec.new_tokens * job.spec.model.max_sequence_length + (
        prompt * prompt if job.attention == "Eager" else 0
    )
    return masked / job.spec.model.max_sequence_length


def key_copies(job: Job) -> float:
    """Number of copies of a token's keys and values: those of a prompt are kept for itself and for its completion."""
    if job.attention == "Chunked":
        return 1.0
    length = job.spec.model.max_sequence_length
    return (2 * length - job.spec.new_tokens) / length


KEY_BLOCK = 32


def in_key_blocks(num_keys: int) -> int:
    """Positions of a cache for so many keys: whole blocks, so that caches and masks have few shapes."""
    return -(-num_keys // KEY_BLOCK) * KEY_BLOCK


def live_elements(model: Architecture) -> float:
    """Elements that the linears of the widest layer read and write, counting the routed experts that a token uses."""
    return max(
        (sum(_times(w, model) * sum(w.shape) for w in layer if w.is_linear) for layer in _layers(model)), default=0.0
    )


def expert_outputs(model: Architecture) -> int:
    """Elements that a token's experts write, before they are summed."""
    return max((_times(w, model) * w.shape[0] for w in model.weights if _is_of_experts_down(w)), default=0)


def _saved(
    weights: list[Weight], model: Architecture, job: Job, gathered: float, tensor: int, token_sets: int | None
) -> float:
    linears = [w for w in weights if w.is_linear]
    total = float(sum({w.input: _read(w, model, tensor, token_sets) for w in linears}.values()))
    is_normed = any(w.name.endswith(("q_norm.weight", "k_norm.weight")) for w in weights)
    for weight in linears:
        out, into = _cut(weight, tensor)
        if weight.target in QUERY_SOURCES[:1]:
            # Chunked attention returns the result as the projection takes it; other kernels return rows to gather.
            total += into * (1 + is_normed + (job.attention != "Chunked"))
        if weight.target in KEYS_AND_VALUES:
            total += out * gathered + (out if is_normed and weight.target == "k_proj" else 0)
        if weight.target in GATED:
            # The activation keeps the gate twice: before and after activation.
            total += out * (1 if weight.target == "up_proj" else 2)
        if _is_of_experts_down(weight):
            # The router's gradient needs each expert's output, which its weight multiplies in the sum.
            total += out
        if job.spec.adapter.type == "LoRA" and weight.target in (job.spec.adapter.targets or ()):
            total += job.rank / (tensor if weight.role == "routed_expert" else 1)
    return total * (_times(weights[0], model) if weights else 1)


def _read(weight: Weight, model: Architecture, tensor: int, token_sets: int | None) -> float:
    """Elements of its input that a token leaves on one rank."""
    is_entered = faces_outside(weight, model) and weight.role in DIVIDED
    if token_sets is None or not is_entered or (token_sets > 1 and weight.role == "shared_expert"):
        return _cut(weight, tensor)[1]
    return weight.shape[-1] / tensor


def _cut(weight: Weight, tensor: int) -> tuple[float, float]:
    """Elements that a token writes and reads on one rank. A token's experts are on any of the ranks."""
    if weight.role == "routed_expert":
        out, into = weight.shape
        return out / tensor, into / tensor
    return cut_shape(weight, tensor)


def _attention_kept(layer: list[Weight], tensor: int) -> float:
    """Elements of the result of chunked attention, which is the input of the next projection."""
    return sum(_cut(w, tensor)[1] for w in layer if w.is_linear and w.target in QUERY_SOURCES[:1])


def _is_of_experts_down(weight: Weight) -> bool:
    return weight.role == "routed_expert" and weight.target == "down_proj"


def _times(weight: Weight, model: Architecture) -> int:
    return model.experts_per_token if weight.role == "routed_expert" else 1


def _layers(model: Architecture) -> Iterator[list[Weight]]:
    numbered = (w for w in model.weights if w.layer is not None)
    by_layer: dict[int | None, list[Weight]] = {}
    for weight in numbered:
        by_layer.setdefault(weight.layer, []).append(weight)
    return iter(by_layer.values())


def _by_experts(layer: Iterable[Weight]) -> Iterator[list[Weight]]:
    """Yields routed experts separately from the rest."""
    ordered = sorted(layer, key=lambda w: w.role == "routed_expert")
    return (list(group) for _, group in groupby(ordered, key=lambda w: w.role == "routed_expert"))
