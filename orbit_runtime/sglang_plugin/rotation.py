"""OFT in SGLang: every slot's R in static buffers, and the input of a target layer rotated row by row.

An OFT adapter uses one of SGLang's LoRA slots with rank 0, and provides R for the slot of the same number. A layer that
SGLang fused has one input, hence one R: q, k, v must share theirs, and gate, up too, as in Orbit's files.

Belongs here: buffers, the rows to rotate, published files. Does not belong here: SGLang (`hooks`), digests
(`readback`), OFT's arithmetic (`adapters.oft`).
Shapes: R `[n, b, b]` with n blocks of b features, a layer's buffer `[slots, n, b, b]`, x `[..., K]`.
"""

from __future__ import annotations

import json
from collections.abc import Buffer, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orbit_runtime.adapters.files import CONFIG_FILE, MODEL_FILE, PEFT_PREFIX, ROTATIONS_FILE
from orbit_runtime.adapters.oft import num_parameters, rotate
from orbit_runtime.adapters.state import check_shared, check_tensors, parse_tensors
from orbit_runtime.errors import InternalError, ModelError

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "wqkv_a": ("q_a_proj", "kv_proj"),
    "wq_b": ("q_b_proj",),
    "wo_b": ("o_b_proj",),
}
"""SGLang's layers that combine several of the checkpoint's or have other names; the last three of DeepSeek-V4."""
MAX_ROWS = 2**20
"""Maximum tokens of one pass; the map from row to slot must not move once a CUDA graph reads it."""
UNTURNED = -1


def parts(module: str) -> tuple[str, ...]:
    """The checkpoint's names for the contents of one of SGLang's layers."""
    parent, _, last = module.rpartition(".")
    return tuple(f"{parent}.{part}" for part in FUSED.get(last, (last,)))


class SlotRows:
    """The slot that rotates each row of the next pass; shared by all layers."""

    def __init__(self, device: torch.device, max_rows: int = MAX_ROWS) -> None:
        self.slots_T = torch.full((max_rows,), UNTURNED, dtype=torch.int32, device=device)
        self.runs: tuple[tuple[int, int, int], ...] = ()
        """(slot, first row, end row) of the rows that are rotated; adjacent runs of one slot are joined."""
        self._filled = 0

    def prepare(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Sets the slot, or `UNTURNED`, and the rows of each sequence of the pass. Written in
        place, for CUDA graphs.
        """
        runs: list[tuple[int, int, int]] = []
        end = 0
        for slot, length in zip(slots, lengths, strict=True):
            start, end = end, end + length
            if slot == UNTURNED or not length:
                continue
            if runs and runs[-1][0] == slot and runs[-1][2] == start:
                start = runs.pop()[1]
            runs.append((slot, start, end))
        if end > len(self.slots_T):
            raise InternalError(f"a pass of {end} tokens; the plug-in is made for {len(self.slots_T)}")
        self.runs = tuple(runs)
        # Rows that pad the pass to a captured size must not keep values from an earlier pass.
        here = torch.full((max(end, self._filled),), UNTURNED, dtype=torch.int32)
        for slot, start, stop in runs:
            here[start:stop] = slot
        if self.slots_T.device.type == "cuda":
            here = here.pin_memory()
        self.slots_T[: len(here)].copy_(here, non_blocking=True)
        self._filled = end


class LayerRotation:
    """R of one layer in every slot, and the rotation of its input."""

    def __init__(
        self, names: tuple[str, ...], in_features: int, block_size: int, num_slots: int, rows: SlotRows, *, rank: int,
        dtype: torch.dtype, is_of_experts: bool,
    ) -> None:  # fmt: skip
        """
        Args:
            names: in files; each has this R.
            rank: index of this rank's part if the layer's input is divided over ranks. R itself is whole on every rank.
            is_of_experts: shared by all experts of a layer: in files R then has a leading axis of length 1.
        """
        shape = (num_slots, in_features // block_size, block_size, block_size)
        self.buffer = torch.zeros(shape, dtype=dtype, device=rows.slots_T.device)
        self.names = names
        self.in_features = in_features
        self.rows = rows
        self._front = (1,) if is_of_experts else ()
        self._rank = rank

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of R in files."""
        return (*self._front, *self.buffer.shape[1:])

    def named(self, R: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The contents of a slot, by file name."""
        for name in self.names:
            yield f"{name}.oft_R", R.view(self.file_shape)

    def turn(self, x: Tensor, *, captured: bool) -> Tensor:
        """x with the rows of OFT adapters rotated, the others unchanged.

        Args:
            captured: a CUDA graph records this pass, so nothing may depend on what the batch holds.
        """
        if not self.rows.runs and (not captured or x.device.type == "cpu"):
            return x
        flat = x.reshape(-1, x.shape[-1])
        turned = self._turn_runs(flat) if x.device.type == "cpu" else self._turn_at_once(flat)
        return turned.view(x.shape)

    def _turn_runs(self, x: Tensor) -> Tensor:
        if self.rows.runs[-1][2] > x.shape[0]:
            raise InternalError(f"adapters reach row {self.rows.runs[-1][2]} of {x.shape[0]}")
        turned = x.clone()
        for slot, start, stop in self.rows.runs:
            turned[start:stop] = rotate(x[start:stop], self.part(slot, x.shape[-1]))
        return turned

    def _turn_at_once(self, x: Tensor) -> Tensor:
        from orbit_runtime.sglang_plugin.rotation_kernel import rotate_rows

        return rotate_rows(x, self.part(slice(None), x.shape[-1]), self.rows.slots_T)

    def part(self, slot: int | slice, width: int) -> Tensor:
        """R of a slot or of several, whole or for the features that a divided input has on this rank."""
        R = self.buffer[slot]
        if width == self.in_features:
            return R
        count = width // R.shape[-1]
        return R[..., self._rank * count : (self._rank + 1) * count, :, :]


@dataclass(frozen=True)
class OFTFiles:
    """An OFT adapter's files, on the CPU."""

    parameters: Mapping[str, Tensor]
    """File name → parameter: kept for reading back, never multiplied."""
    rotations: Mapping[str, Tensor]
    """SGLang's name of the layer → rotation."""


class RotationTable:
    """The rotations of all layers of a model."""

    def __init__(self, block_size: int, num_slots: int, device: torch.device, dtype: torch.dtype) -> None:
        self.block_size = block_size
        self.rows = SlotRows(device)
        self.layers: dict[str, LayerRotation] = {}
        self.holds = [False] * num_slots
        """Whether each slot holds an OFT adapter."""
        self._dtype = dtype

    def add_layer(
        self, name: str, in_features: int, *, local_features: int | None = None, rank: int = 0,
        names: tuple[str, ...] | None = None,
    ) -> LayerRotation:  # fmt: skip
        """
        Args:
            names: file names, for a layer of routed experts.
        """
        local_features = in_features if local_features is None else local_features
        if local_features % self.block_size:
            raise ModelError(
                f"blocks of {self.block_size} do not divide the {local_features} input features of {name} on a rank"
            )
        self.layers[name] = LayerRotation(
            names or parts(name), in_features, self.block_size, len(self.holds), self.rows, rank=rank,
            dtype=self._dtype, is_of_experts=names is not None,
        )  # fmt: skip
        return self.layers[name]

    def fill(self, slot: int, published: OFTFiles) -> None:
        for name, layer in self.layers.items():
            layer.buffer[slot].copy_(published.rotations[name].view_as(layer.buffer[slot]))
        self.holds[slot] = True

    def clear(self, slot: int) -> None:
        """Safe to call twice."""
        if self.holds[slot]:
            self.holds[slot] = False
            for layer in self.layers.values():
                layer.buffer[slot].zero_()

    def prepare(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Call before a pass with the slot and number of rows of each of its sequences, OFT or not."""
        self.rows.prepare([slot if self.holds[slot] else UNTURNED for slot in slots], lengths)

    def load(self, files: Mapping[str, Buffer]) -> OFTFiles:
        """Raises ModelError naming what does not fit this model. The read-back shows whether R is the right one."""
        settings = json.loads(bytes(files[CONFIG_FILE]))
        if settings.get("oft_block_size") != self.block_size:
            raise ModelError(
                f"oft_block_size is {settings.get('oft_block_size')}, this server was started for {self.block_size}",
                where=CONFIG_FILE,
            )
        parameters, turned = (parse_tensors(files, name) for name in (MODEL_FILE, ROTATIONS_FILE))
        shapes = {f"{name}.oft_R": layer.file_shape for layer in self.layers.values() for name in layer.names}
        size = num_parameters(self.block_size, self.block_size)
        check_tensors(
            MODEL_FILE, parameters,
            {f"{PEFT_PREFIX}{key}.weight": (*shape[:-2], size) for key, shape in shapes.items()}, torch.float32,
        )  # fmt: skip
        check_tensors(ROTATIONS_FILE, turned, shapes, torch.bfloat16)
        rotations = {}
        for name, layer in self.layers.items():
            first, *others = (f"{part}.oft_R" for part in layer.names)
            for other in others:
                check_shared(ROTATIONS_FILE, turned, other, first)
            rotations[name] = turned[first]
        return OFTFiles(parameters, rotations)
