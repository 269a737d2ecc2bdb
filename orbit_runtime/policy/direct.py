"""The decoder of Llama-form models as one straight sequence of tensor operations.

The cost of a decode step on a CPU depends on the number of operations, not on their size: transformers' modules take
about 220 per layer, this takes about 40. Linears that read the same input are one product if their weights allow it,
each under its own adapter; queries and keys are normalised and rotated together, and the residual is added in place.
The engine uses it, and on a CPU the trainer too, unless it trains a whole model, drops, or computes layers again.

Belongs here: recognising models of that form, their forward pass, and sharing one packed weight among neighbours. Does
not belong here: the steps' gradients (`gradients`), other forms (those run through their own modules), attention over
the cache (`rollout.cache`), one layer's dispatch and maths (`adapters`).

Legend: `T` tokens, `N` hidden size, `H` query heads, `K` key/value heads, `D` head size; of a group of linears: x
`[T, K]`, result `[T, N]` with N the sum of the members' outputs, in their order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orbit_runtime.adapters.layer import AdaptedLinear, Segment, Slot
from orbit_runtime.adapters.lora import LoRASlot, add_lora_
from orbit_runtime.adapters.oft import OFTSlot, rotate
from orbit_runtime.errors import InternalError
from orbit_runtime.policy import native
from orbit_runtime.policy.attention import AttentionPlan, AttentionSettings, decoder_of
from orbit_runtime.policy.gradients import AdaptedProduct, Rotated, gated, normed, turned
from orbit_runtime.policy.logprobs import FEWEST_ROWS, rows_are_equal, twice
from orbit_runtime.quant.bf16 import BF16Weight
from orbit_runtime.quant.kernels import panels
from orbit_runtime.quant.linear import DENSE_BYTES_LIMIT, FrozenLinear, share_rows

ALL_ROWS = 1 << 62
"""End of a slot's rows that is after every row, padding included."""
BLOCKS = {
    torch.bfloat16: ((8, ALL_ROWS, ALL_ROWS), (FEWEST_ROWS[torch.bfloat16], 192, ALL_ROWS)),
    torch.float32: ((FEWEST_ROWS[torch.float32], ALL_ROWS, ALL_ROWS), (FEWEST_ROWS[torch.float32], 48, 256)),
}
"""Least and most rows of a product, and from how many on any number is right again: for which the library may multiply
by one kernel. oneDNN's of BF16, without AMX and with it, wherever it does not cut the columns; MKL's of fp32, for most
shapes and for all."""
ADDED_ROWS = {torch.bfloat16: 4096, torch.float32: 256}
"""Most rows of one product of an adapter's, which is narrow."""


@cache
def find_blocks(
    dtype: torch.dtype, in_features: int, out_features: int, rank: int, block_size: int, _num_threads: int
) -> tuple[int, int, int] | None:
    """Those of `BLOCKS` for which products of this shape, of an input turned in blocks of this size (0: as it is), give
    a row the same bits, if LoRA of this rank (0: none) does for all up to `ADDED_ROWS`. None if there are none."""
    generator = torch.Generator().manual_seed(0)
    turns = (in_features // block_size, block_size, block_size) if block_size else (1, 1, 1)
    shapes = ((out_features, in_features), (rank, in_features), (out_features, rank), turns)
    w, A, B, R = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    w, A, R = (twice(each, 1, -1.0) for each in (w, A, R))
    linear, slot, dense = FrozenLinear(BF16Weight(w)), LoRASlot(A, B, 2.0), w.to(dtype).view(-1)
    if dtype is torch.bfloat16:
        linear.order()
    tried = [lambda x: linear.product(x, dense), lambda x: linear.product(rotate(x, R), dense)][
        : 2 if block_size else 1
    ]
    for fewest, most, again in BLOCKS[dtype]:
        if all(
            rows_are_equal(product, in_features, dtype, (fewest, min(most, 1000)), (again, 1000)) for product in tried
        ) and (
            not rank
            or rows_are_equal(
                # To something as small as what A's sums leave.
                lambda x: add_lora_(x.new_full((len(x), out_features), 1e-7), x, slot),
                in_features,
                dtype,
                (fewest, ADDED_ROWS[dtype]),
            )
        ):
            return fewest, most, again
    return None


class LinearGroup:
    """Adapted or bare frozen linears over one input."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        self._members = list(members)
        bases = [member.base if isinstance(member, AdaptedLinear) else member for member in members]
        self.base = share_rows([base for base in bases if isinstance(base, FrozenLinear)])
        """All of them as one; None if their weights cannot be joined."""
        self._adapted: list[tuple[AdaptedLinear, int, int]] = []
        start = 0
        for member in members:
            stop = start + int(member.out_features)  # type: ignore[arg-type]
            if isinstance(member, AdaptedLinear):
                self._adapted.append((member, start, stop))
            start = stop
        self.blocks: tuple[int, int, int] | None = None
        """See `BLOCKS`; None if the library has no numbers of rows for which a row's bits are the same."""
        self._adds = False
        """Whether products are by Orbit's own kernel, which adds LoRA to its sums."""
        self.parts: list[LinearGroup] = []
        """A group for each member, if only such have a number of rows."""
        self._stacks: dict[str, tuple[list[LoRASlot], LoRASlot]] = {}
        first = self._adapted[0][0] if self._adapted else None
        self._selection = first.selection if first is not None else None
        self._rotates = first is not None and first.config.type == "OFT"
        self._is_one = self.base is not None and not (self._rotates and len(self._adapted) < len(self._members))
        """Whether all are one product, over one input: adapted members read theirs turned, by the same R."""

    @property
    def dense_size(self) -> int:
        """Elements of the weight that is dequantised at a time."""
        return self.base.out_features * self.base.in_features if self.base is not None else 0

    def order(self, dtype: torch.dtype, *, holds: bool) -> None:
        """Finds how many rows to hand to products. Args: holds: whether a BF16 weight is held once more, as they read
        it."""
        if not self._is_one and len(self._members) > 1:
            parts = [LinearGroup([member]) for member in self._members]
            for part in parts:
                part.order(dtype, holds=holds)
            if all(part.blocks for part in parts):
                self.parts, self.blocks = parts, parts[0].blocks
        elif self.base is not None:
            is_ready = dtype is torch.float32 or (holds and self.base.order())
            self._adds = not self._rotates and panels.can_multiply(torch.empty(0, dtype=dtype), self.base.in_features)
            if self._adds:
                self.blocks = (1, ALL_ROWS, ALL_ROWS)
            if self._adds or not is_ready:
                return
            config = self._adapted[0][0].config if self._adapted else None
            rank = config.rank * len(self._adapted) if config is not None and not self._rotates else 0
            turned = config.block_size if config is not None and self._rotates else 0
            shape = (self.base.in_features, self.base.out_features, rank, turned, torch.get_num_threads())
            self.blocks = find_blocks(dtype, *shape)

    def __call__(self, x_TK: Tensor, dense: Tensor) -> Tensor:
        """`dense`: see `FrozenLinear.product`."""
        if self.parts:
            return torch.cat([part(x_TK, dense) for part in self.parts], -1)
        active = self._selection.active if self._selection is not None else None
        records = torch.is_grad_enabled() and (active is not None or x_TK.requires_grad)
        turns = self._rotates and active is not None
        if not self._is_one and (self.base is None or turns):
            return self._one_by_one(x_TK)
        if turns and self.blocks is None and (records or not isinstance(active, str)):
            return self._one_by_one(x_TK)
        if not isinstance(active, str) and active and active[-1][2] > len(x_TK):
            raise InternalError(f"adapter segments reach row {active[-1][2]} of {len(x_TK)}")
        runs: tuple[Segment, ...] = ((active, 0, len(x_TK)),) if isinstance(active, str) else active or ()
        held = [
            # Padding after the last row is anything's.
            (name, [layer.slot(name) for layer, _, _ in self._adapted], start, ALL_ROWS if stop == len(x_TK) else stop)
            for name, start, stop in runs
            if name is not None and stop > start
        ]
        # Adapters of other trainings may be of the other type, or turn members differently.
        if not all(map(self._fits, (slots for _, slots, _, _ in held))):
            return self._one_by_one(x_TK)
        if turns:
            for _, slots, start, stop in held:
                turned = Rotated.apply(x_TK[start:stop], slots[0].rotation, self.in_blocks)  # type: ignore[union-attr]
                x_TK = turned if len(turned) == len(x_TK) else torch.cat((x_TK[:start], turned, x_TK[stop:]))
            held = []
        if records:
            return self._with_gradient(x_TK, held[0][1] if held else [], dense)  # type: ignore[arg-type]
        adapters = [(self._stacked(name, slots), *rows) for name, slots, *rows in held]  # type: ignore[arg-type]
        return self._adapted_product(x_TK, adapters, dense)

    def _fits(self, slots: Sequence[Slot]) -> bool:
        if self._rotates:
            first = slots[0]
            return all(isinstance(s, OFTSlot) and s.rotation is getattr(first, "rotation", None) for s in slots)
        return all(isinstance(slot, LoRASlot) for slot in slots)

    def _adapted_product(self, x_TK: Tensor, adapters: Sequence[tuple[LoRASlot, int, int]], dense: Tensor) -> Tensor:
        """Args: adapters: each with its first and end row, in the order of rows."""
        base: FrozenLinear = self.base  # type: ignore[assignment]
        product = partial(base.product, dense=dense)
        if self._adds and base.takes_adds(x_TK, dense):
            return self._in_panels(x_TK, adapters, product)
        y_TN = self.in_blocks(x_TK, product)
        most = ADDED_ROWS[x_TK.dtype] if self.blocks is not None else ALL_ROWS
        for slot, start, stop in adapters:
            for y, x in zip(*(each[start:stop].split(most) for each in (y_TN, x_TK)), strict=True):
                missing = 0 if self.blocks is None else self.blocks[0] - len(x)
                if missing > 0:
                    y.copy_(add_lora_(*(F.pad(each, (0, 0, 0, missing)) for each in (y, x)), slot)[: len(x)])
                else:
                    add_lora_(y, x, slot)
        return y_TN

    def _in_panels(
        self, x_TK: Tensor, adapters: Sequence[tuple[LoRASlot, int, int]], product: Callable[..., Tensor]
    ) -> Tensor:
        """Each run of rows by a call of its own, which adds its adapter."""
        parts, at, end = [], 0, len(x_TK)
        for slot, start, stop in (*adapters, (None, end, end)):
            if start > at:
                parts.append(product(x_TK[at:start]))
            if slot is not None:
                parts.append(product(x_TK[start:stop], lora=(slot.lora_A, slot.lora_B.t(), slot.scaling)))
            at = stop
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def in_blocks(self, x_TK: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """`product` of x, of numbers of rows for which the library gives a row the same bits, if there are such."""
        count = len(x_TK)
        if self.blocks is None or self.blocks[0] <= count <= self.blocks[1] or count >= self.blocks[2]:
            return product(x_TK)
        if count < self.blocks[0]:
            return product(F.pad(x_TK, (0, 0, 0, self.blocks[0] - count)))[:count]
        return torch.cat([product(part) for part in x_TK.tensor_split(-(-count // self.blocks[1]))])

    def _stacked(self, name: str, slots: list[LoRASlot]) -> LoRASlot:
        """The members' LoRA as one: A below A, each B in its own rows and columns, zeros elsewhere. From then on the
        members' slots are views of it, so that a trace shows what is multiplied."""
        held = self._stacks.get(name)
        if held is not None and all(map(operator.is_, held[0], slots)):
            return held[1]
        whole = slots[0]
        if len(self._members) > 1 or self._adds:
            whole, places = self._whole(slots)
            for slot, (ranks, outputs) in zip(slots, places, strict=True):
                # The same tensors as before, for whoever has noted them, now where the whole lies.
                slot.lora_A.data, slot.lora_B.data = whole.lora_A[ranks], whole.lora_B[outputs, ranks]
        # Only of slots that are still loaded.
        self._stacks = {each: kept for each, kept in self._stacks.items() if each in self._adapted[0][0].slots}
        self._stacks[name] = (slots, whole)
        return whole

    def _whole(self, slots: Sequence[LoRASlot]) -> tuple[LoRASlot, list[tuple[slice, slice]]]:
        """The members' LoRA as one, and of each its ranks and its outputs in it."""
        base: FrozenLinear = self.base  # type: ignore[assignment]
        ends = [*accumulate(len(slot.lora_A) for slot in slots)]
        spans = zip((0, *ends[:-1]), ends, self._adapted, strict=True)
        places = [(slice(first, last), slice(start, stop)) for first, last, (_, start, stop) in spans]
        A_RK = torch.cat([slot.lora_A.detach() for slot in slots])
        shape = base.out_features, ends[-1]
        # Orbit's kernel reads rows of B transposed.
        B_NR = A_RK.new_zeros(shape[::-1]).t() if self._adds else A_RK.new_zeros(shape)
        for slot, (ranks, outputs) in zip(slots, places, strict=True):
            B_NR[outputs, ranks] = slot.lora_B.detach()
        return LoRASlot(A_RK, B_NR, slots[0].scaling), places

    def _with_gradient(self, x_TK: Tensor, slots: Sequence[LoRASlot], dense: Tensor) -> Tensor:
        """The same sums as with `_stacked`, recorded for gradients. Args: slots: empty for the base alone."""
        base: FrozenLinear = self.base  # type: ignore[assignment]
        if not slots:
            bare = partial(self.in_blocks, product=partial(base.product, dense=dense))
            result: Tensor = AdaptedProduct.apply(x_TK, bare, base.input_gradient, None, ())
            return result
        whole, places = self._whole(slots)
        forward = partial(self._adapted_product, adapters=[(whole, 0, ALL_ROWS)], dense=dense)
        members = (tensor for slot in slots for tensor in (slot.lora_A, slot.lora_B))
        result = AdaptedProduct.apply(x_TK, forward, base.input_gradient, whole, places, *members)
        return result

    def _one_by_one(self, x_TK: Tensor) -> Tensor:
        parts = [member(x_TK) for member in self._members]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


FORMS = ("llama", "qwen2", "qwen3")
"""`model_type`s whose decoder layers are: norm, attention with rotary embedding, residual, norm, SwiGLU, residual."""
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone and can be tabulated."""


class _Norm(NamedTuple):
    weight: Tensor
    """fp32."""
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    before_attention: _Norm
    qkv: LinearGroup
    qk_norm: _Norm | None
    """Weights `[H + K, D]`, first the queries', then the keys'."""
    output: LinearGroup
    before_mlp: _Norm
    gate_up: LinearGroup
    down: LinearGroup
    heads: tuple[int, int, int]
    """H, K, D."""
    look: AttentionSettings
    """The layer's way of attending, with the scale that remains to be applied to the scores."""

    @property
    def groups(self) -> tuple[LinearGroup, ...]:
        return self.qkv, self.output, self.gate_up, self.down


class DirectDecoder:
    """Hidden states of a Llama-form model; built once the model is on its device."""

    def __init__(self, decoder: nn.Module, compute_dtype: torch.dtype, *, ordered: bool) -> None:
        self._dtype = compute_dtype
        self._embed: nn.Module = decoder.embed_tokens  # type: ignore[assignment]
        self._rotary: nn.Module = decoder.rotary_emb  # type: ignore[assignment]
        self._norm = _norm(decoder.norm)
        self._layers = [_build_layer(layer) for layer in decoder.layers]  # type: ignore[union-attr,arg-type]
        self._cos_PD = self._sin_PD = torch.empty(0, 0)
        self._groups = [group for layer in self._layers for group in layer.groups]
        for group in self._groups if self._norm.weight.device.type == "cpu" else ():
            group.order(compute_dtype, holds=ordered)
        sizes = [group.dense_size for group in self._groups]
        limit = DENSE_BYTES_LIMIT[self._norm.weight.device.type] // compute_dtype.itemsize
        most = max((size for size in sizes if size <= limit), default=0)
        self._dense = self._norm.weight.new_empty(most, dtype=compute_dtype)
        """Buffer for one dequantised weight at a time; a larger weight is processed in runs of rows."""

    @property
    def gives_same_bits(self) -> bool:
        """Whether a token's hidden states have the same bits whatever is computed beside it."""
        return native.kernel() is not None and all(group.blocks is not None for group in self._groups)

    def shared(self) -> list[tuple[str, FrozenLinear]]:
        """The linears over one input by which it multiplies in place of the model's own, over the same packed bytes."""
        bases = (each.base for group in self._groups for each in group.parts or [group])
        return [(f"group {number}", base) for number, base in enumerate(bases) if base is not None]

    def hidden(self, token_ids_T: torch.Tensor, position_T: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """`[T, N]` after the final norm.

        Args:
            token_ids_T: int64.
            position_T: int64, each below `plan.longest`.
        """
        # In BF16: products and their inputs; the residual stream, norms and rotations are fp32.
        x_TN, dense, dtype = self._embed(token_ids_T).float(), self._dense, self._dtype
        cos_T1D, sin_T1D = self._angles(position_T, plan.longest, x_TN)
        added_TN: Tensor | None = None
        for number, layer in enumerate(self._layers):
            heads, kv_heads, size = layer.heads
            x_TN, normed_TN = normed(x_TN, added_TN, *layer.before_attention, dtype)
            qkv_THD = layer.qkv(normed_TN, dense).view(len(x_TN), -1, size)
            qk_THD, v_TKD = qkv_THD.split((heads + kv_heads, kv_heads), 1)
            qk_THD = turned(qk_THD, cos_T1D, sin_T1D, *(layer.qk_norm or ()))
            attended_TN = plan.attend_tokens(number, *qk_THD.split((heads, kv_heads), 1), v_TKD, layer.look)
            x_TN, normed_TN = normed(x_TN, layer.output(attended_TN, dense), *layer.before_mlp, dtype)
            added_TN = layer.down(gated(layer.gate_up(normed_TN, dense)), dense)
        return normed(x_TN, added_TN, *self._norm, dtype)[1]

    def _angles(self, position_T: torch.Tensor, longest: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if longest > len(self._cos_PD):
            positions = torch.arange(1 << (longest - 1).bit_length(), device=like.device)
            cos, sin = self._rotary.forward(like, positions[None])
            sign = torch.ones(sin.shape[-1], device=like.device)
            sign[: sin.shape[-1] // 2] = -1.0
            self._cos_PD, self._sin_PD = cos[0], sin[0] * sign
        cos_TD, sin_TD = (table.index_select(0, position_T) for table in (self._cos_PD, self._sin_PD))
        return cos_TD.unsqueeze(1), sin_TD.unsqueeze(1)


def build_direct(model: nn.Module, compute_dtype: torch.dtype, *, ordered: bool = False) -> DirectDecoder | None:
    """The decoder of `model` in direct form, or None if its form or rope does not match.

    Args: ordered: whether BF16 weights are held once more, as products read them.
    """
    config = model.config
    decoder = decoder_of(model)
    rope = getattr(decoder.rotary_emb, "rope_type", None) if hasattr(decoder, "rotary_emb") else None
    of_form = (
        config.model_type in FORMS  # type: ignore[union-attr]
        and config.hidden_act == "silu"  # type: ignore[union-attr]
        and rope in STATIC_ROPE
        and all(getattr(layer.self_attn, "sliding_window", None) is None for layer in decoder.layers)
    )
    return DirectDecoder(decoder, compute_dtype, ordered=ordered) if of_form else None


def _norm(module: nn.Module) -> _Norm:
    weight: Tensor = module.weight  # type: ignore[assignment]
    eps = float(getattr(module, "variance_epsilon", None) or module.eps)  # type: ignore[arg-type]
    return _Norm(weight.detach().float(), eps)


def _build_layer(layer: nn.Module) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    size = attention.head_dim
    heads, kv_heads = attention.q_proj.out_features // size, attention.k_proj.out_features // size
    qk_norm, scale = None, float(attention.scaling)
    if hasattr(attention, "q_norm"):
        q, k = _norm(attention.q_norm), _norm(attention.k_norm)
        assert q.eps == k.eps
        # The attention scale is folded into the query weights, which saves an operation.
        weight = torch.cat((q.weight.expand(heads, -1) * scale, k.weight.expand(kv_heads, -1)))
        qk_norm, scale = _Norm(weight, q.eps), 1.0
    return _Layer(
        before_attention=_norm(layer.input_layernorm),
        qkv=LinearGroup([attention.q_proj, attention.k_proj, attention.v_proj]),
        qk_norm=qk_norm,
        output=LinearGroup([attention.o_proj]),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate_up=LinearGroup([mlp.gate_proj, mlp.up_proj]),
        down=LinearGroup([mlp.down_proj]),
        heads=(heads, kv_heads, size),
        look=AttentionSettings(scale),
    )
