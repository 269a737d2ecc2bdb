"""A base layer with adapter slots, and the selection of the slot that applies to each row of a pass.

Belongs here: dispatch from selection to maths.
Does not belong here: the maths (`lora`, `oft`), which layers are wrapped (`inject`), files (`state`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.fair_lock import FairLock
from orbit_runtime.adapters.lora import LoRASlot, add_lora, dropout
from orbit_runtime.adapters.oft import OFTSlot, rotate
from orbit_runtime.adapters.part import WHOLE, WeightPart
from orbit_runtime.adapters.rotations import RotationCache
from orbit_runtime.errors import InternalError
from orbit_runtime.seeds import stream_key

TRAINER_SLOT = "trainer"
"""The slot whose values come from the trainer's masters, with gradient."""
CRITIC_SLOT = "critic"
"""The slot whose values come from the masters of a critic, if there is one."""

Slot = LoRASlot | OFTSlot
Segment = tuple[str | None, int, int]
"""(slot name, first row, end row) over the flattened rows of the pass; rows in no segment use the bare base."""


@dataclass(frozen=True, slots=True, eq=False)
class AppliedTensors:
    """One layer's entry in a trace: the very tensors that it multiplied by."""

    module: str
    slot: str
    tensors: Mapping[str, Tensor]
    """Tensors by file name."""
    scaling: float | None
    experts: slice = WHOLE
    """The experts, among those of this process, to which these tensors belong."""


class SlotBuilder(Protocol):
    """Builds slots from masters, with published rounding and straight-through gradient."""

    def __call__(
        self, layer: str | None = None, experts: slice = WHOLE, newest: RotationCache | None = None, /
    ) -> dict[str, Slot]:
        """See `Masters.applied`."""


@dataclass(frozen=True, slots=True, eq=False)
class Dropout:
    """The dropout of a training pass. For the inputs of dense layers it is the same whichever process has the token;
    routed experts draw it for the tokens that their process sends them."""

    key: int
    places_T: Tensor | None = None
    """Indices of this process's tokens among those of the pass; None if it has all."""
    num_tokens: int = 0
    """Tokens of all processes together."""


@dataclass(eq=False)
class Selection:
    """Shared by all layers of one model. One pass at a time sets it, with `use`; others wait for their turn."""

    compute_dtype: torch.dtype = torch.float32
    """The dtype that slots are widened to."""
    active: str | tuple[Segment, ...] | None = None
    trace: Callable[[AppliedTensors], None] | None = None
    """If set, every layer calls it with what it applies."""
    applied_masters: dict[str, SlotBuilder] = field(default_factory=dict)
    """Slot → how its values are built."""
    live: dict[str, dict[str, Slot]] = field(default_factory=dict)
    """Slot → layer → what was built for the current pass."""
    by_layer: RotationCache | None = None
    """If set, each layer has its slot built when the current pass reaches it, and releases it at once."""
    rotated: tuple[Tensor, int, Tensor, Tensor] | None = None
    """(input, its version, R, result) of the newest rotation: projections with the same input and R share it."""

    dropout: Dropout | None = None
    """Dropout of the current training pass; None for no dropout."""
    rows: int | None = None
    """If set, segments count this many rows, and a layer that sees a multiple of them sees as many of each: keys that a
    layer computes again from a cache."""
    turn: FairLock = field(default_factory=FairLock)
    """Held by the thread that selects: an engine may sample in another thread than the trainer's."""

    @contextmanager
    def use(
        self, segments: str | Sequence[Segment] | None, *, dropout: Dropout | None = None, by_layer: bool = False
    ) -> Iterator[None]:
        """Within this context, layers apply nothing (None), one slot (its name), or one slot per run of rows.

        With the trainer's slot the rounded masters are computed once, on entry, and all passes within share their
        graph: enter once per forward and backward. Contexts nest; an inner one hides the outer one.

        Args:
            dropout: enables LoRA's dropout, drawn from this stream.
            by_layer: the rounded masters are computed where a pass reaches them instead, a layer or some of its experts
                at a time, and released at once. For one pass without gradient.
        """
        active = segments if segments is None or isinstance(segments, str) else _checked(segments)
        names = {active} if isinstance(active, str) else {name for name, _, _ in active or ()}
        with self.turn:
            before = (self.active, self.live, self.dropout, self.by_layer)
            wanted = {} if by_layer else self.applied_masters
            if made := {name: build() for name, build in wanted.items() if name in names}:
                self.live = made
            self.active, self.dropout, self.by_layer = active, dropout, RotationCache() if by_layer else None
            try:
                yield
            finally:
                self.active, self.live, self.dropout, self.by_layer = before
                self.rotated = None

    def remembered(self) -> Callable[[], AbstractContextManager[None]]:
        """A context that restores what is applied now, for a layer that is recomputed in the backward pass."""
        return partial(self._again, self.active, self.live, self.dropout)

    @contextmanager
    def _again(
        self, active: str | tuple[Segment, ...] | None, live: dict[str, dict[str, Slot]], dropout: Dropout | None
    ) -> Iterator[None]:
        before = (self.active, self.live, self.dropout, self.trace)
        self.active, self.live, self.dropout, self.trace = active, live, dropout, None
        self.rotated = None
        try:
            yield
        finally:
            self.active, self.live, self.dropout, self.trace = before
            self.rotated = None

    @contextmanager
    def only(self, slot: str | None) -> Iterator[None]:
        """Within a `use` of segments: applies one of its slots in a pass over that slot's rows only."""
        before, self.active = self.active, slot
        try:
            yield
        finally:
            self.active, self.rotated = before, None


def _checked(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    end = 0
    for name, start, stop in segments:
        if start < end or stop < start:
            raise InternalError(f"adapter segments must be in order and disjoint: {name!r} has rows {start} to {stop}")
        end = stop
    return tuple(segments)


class _Layer(Protocol):
    """The attributes of a dense or expert layer that dispatch needs."""

    name: str
    config: AdapterConfig
    selection: Selection
    slots: dict[str, Slot]
    part: WeightPart

    def named(self, slot: Slot, experts: slice = WHOLE) -> Mapping[str, Tensor]: ...


def find_slot(layer: _Layer, name: str, experts: slice = WHOLE) -> Slot:
    """The slot called `name`. Calls the trace, so call it once per use.

    Args:
        experts: where slots are built by layer, the experts whose values are wanted.
    """
    selection = layer.selection
    try:
        if selection.by_layer is not None and name in selection.applied_masters:
            slot = selection.applied_masters[name](layer.name, experts, selection.by_layer)[layer.name]
        else:
            slot = selection.live[name][layer.name] if name in selection.live else layer.slots[name]
    except KeyError:
        raise InternalError(f"no slot {name!r} in layer {layer.name}; it has {sorted(layer.slots)}") from None
    if selection.trace is not None:
        scaling = slot.scaling if isinstance(slot, LoRASlot) else None
        selection.trace(AppliedTensors(layer.name, name, layer.named(slot, experts), scaling, experts))
    return slot


def dropped(x: Tensor, layer: _Layer, places_T: Tensor | None = None) -> Tensor:
    """The input of A: x, or in a training pass with dropout the part of x that is kept.

    Args:
        places_T: indices of x's rows among the pass's tokens, if these are divided; None if x has all of them.
    """
    stream, share, columns = layer.selection.dropout, layer.config.dropout, layer.part.columns
    if stream is None or not share:
        return x
    key = stream_key(stream.key, "lora-dropout", layer.name)
    if columns == WHOLE and places_T is None:
        return dropout(x, share, key)
    # Each process drops from its columns and tokens exactly what a single process would.
    shape = x.shape[:-1] if places_T is None else (*x.shape[:-2], stream.num_tokens)
    kept = dropout(x.new_ones(*shape, layer.part.shape[1]), share, key)
    return x * (kept if places_T is None else kept[..., places_T, :])[..., columns]


class AdaptedLinear(nn.Module):
    """Any linear layer, with the selected adapter applied. The base is called once per pass."""

    def __init__(self, base: nn.Module, name: str, config: AdapterConfig, selection: Selection) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self.config = config
        self.selection = selection
        self.in_features: int = base.in_features  # type: ignore[assignment]
        self.out_features: int = base.out_features  # type: ignore[assignment]
        self.part: WeightPart = getattr(base, "part", None) or WeightPart(shape=(self.out_features, self.in_features))
        self.slots: dict[str, Slot] = {}
        self.shares_input = False
        """OFT: other layers have the same input and the same R."""

    @property
    def weight(self) -> Tensor:
        """The base's weight, for model code that reads a layer's dtype or device."""
        return self.base.weight  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        tensor = next(iter(self.base.buffers()), None)
        return tensor.device if tensor is not None else next(self.base.parameters()).device

    def shapes(self, config: AdapterConfig | None = None) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole layer's parameters, by kind. `config`: of an adapter other than the policy's."""
        config = config or self.config
        rank, size = config.rank, config.block_size
        rows, columns = self.part.shape
        if config.type == "LoRA":
            return {"lora_A": (rank, columns), "lora_B": (rows, rank)}
        return {"oft_R": (columns // size, size * (size - 1) // 2)}

    def file_names(self, kind: str) -> tuple[str, ...]:
        return (f"{self.name}.{kind}",)

    held_names = file_names

    def named(self, slot: Slot, experts: slice = WHOLE) -> dict[str, Tensor]:
        """The slot's tensors by file name."""
        return {f"{self.name}.{kind}": tensor for kind, tensor in slot.tensors().items()}

    def forward(self, x: Tensor) -> Tensor:
        selection = self.selection
        active = selection.active
        if active is None:
            return self.base(x)  # type: ignore[no-any-return]
        if isinstance(active, str):
            slot = self.slot(active)
            if isinstance(slot, LoRASlot):
                places_T = selection.dropout.places_T if selection.dropout else None
                return add_lora(self.base(x), dropped(x, self, places_T), slot)
            return self.base(self.rotated(x, slot))  # type: ignore[no-any-return]
        return self._forward_segments(x, active)

    def slot(self, name: str) -> Slot:
        return find_slot(self, name)

    def rotated(self, x: Tensor, slot: OFTSlot) -> Tensor:
        """`x R`, computed once for neighbours that share x and R."""
        if not self.shares_input:
            return rotate(x, slot.rotation)
        selection, version = self.selection, -1 if x.is_inference() else x._version
        newest = selection.rotated
        if newest is not None and newest[0] is x and newest[1] == version and newest[2] is slot.rotation:
            return newest[3]
        result = rotate(x, slot.rotation)
        selection.rotated = (x, version, slot.rotation, result)
        return result

    def _forward_segments(self, x: Tensor, segments: tuple[Segment, ...]) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if self.selection.rows:
            each = len(flat) // self.selection.rows
            segments = tuple((name, start * each, stop * each) for name, start, stop in segments)
        if segments and segments[-1][2] > flat.shape[0]:
            raise InternalError(f"adapter segments reach row {segments[-1][2]} of {flat.shape[0]} in layer {self.name}")
        runs = [(self.slot(name), start, stop) for name, start, stop in segments if name is not None and stop > start]
        if self.config.type == "OFT":
            turned = flat.clone()
            for slot, start, stop in runs:
                turned[start:stop] = rotate(flat[start:stop], slot.rotation)  # type: ignore[union-attr]
            return self.base(turned.view(x.shape))  # type: ignore[no-any-return]
        y: Tensor = self.base(x)
        rows = y.view(-1, y.shape[-1])
        if torch.is_grad_enabled():
            rows = rows.clone()
        for slot, start, stop in runs:
            part = add_lora(rows[start:stop], flat[start:stop], slot)  # type: ignore[arg-type]
            if part.data_ptr() != rows[start:stop].data_ptr():
                rows[start:stop] = part
        return rows.view(*x.shape[:-1], rows.shape[-1])
