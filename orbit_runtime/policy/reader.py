"""The tensors of a checkpoint folder, by name, each read on request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.headers import TensorInfo, read_folder
from orbit_runtime.quant.checks import DAMAGED

IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
"""Tensors that are not used: values that the model computes itself, and static scales of caches and, weight-only, of
activations.
"""


class CheckpointReader:
    """Reads tensors of a folder by name, and tracks which were never requested."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self.tensors: dict[str, tuple[Path, TensorInfo]] = read_folder(folder)
        self._unused = set(self.tensors)
        self._device = device
        self._open: tuple[Path, Any] | None = None

    def headers(self) -> dict[str, TensorInfo]:
        return {name: info for name, (_, info) in self.tensors.items()}

    def file_of(self, name: str) -> Path:
        return self.tensors[name][0] if name in self.tensors else self.folder

    def has(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str) -> torch.Tensor:
        """Returns it on the device, in the file's dtype."""
        if name not in self.tensors:
            raise ModelError(
                f"the checkpoint holds no tensor {name}", where=str(self.folder), fix="download the model again"
            )
        path, info = self.tensors[name]
        try:
            if self._open is None or self._open[0] != path:
                self._open = (path, safe_open(str(path), framework="pt", device="cpu"))
            values: torch.Tensor = self._open[1].get_tensor(info.stored_as or name).to(self._device)
        except SafetensorError as error:
            raise ModelError(f"{name} cannot be read: {error}", where=str(path), fix=DAMAGED) from None
        self._unused.discard(name)
        # Scales are checked by their formats. A sum takes one pass and no memory; finite values whose sum is too large
        # are looked at one by one.
        is_plain = values.is_floating_point() and values.element_size() > 1 and "scale" not in name
        if is_plain and not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
            raise ModelError(f"{name} is not finite: it holds NaN or infinite values", where=str(path), fix=DAMAGED)
        return values

    def check_all_used(self, left_out: Sequence[str] = ()) -> None:
        """`left_out`: regular expressions for names outside the language model, matched from the start."""
        known = re.compile("|".join(left_out)) if left_out else None
        left = sorted(
            name
            for name in self._unused
            if not name.endswith(IGNORED_SUFFIXES) and not (known is not None and known.match(name))
        )
        if left:
            listed = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            raise ModelError(f"tensors that belong to no layer of this model: {listed}", where=str(self.folder))
