"""Trainer state as bytes: masters, AdamW moments and counters in one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Buffer, Mapping

import torch

from orbit_runtime.adapters.state import check_tensors
from orbit_runtime.adapters.tensorfile import TensorFile, build, parse
from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.headers import parse_header

PART = "trainer.safetensors"
CRITIC_PART = "critic.safetensors"
TEACHER_PART = "teacher.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")


def build_state(
    masters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer | None, counters: Mapping[str, int]
) -> TensorFile:
    """Tensors `master/<name>`, `exp_avg/<name>`, `exp_avg_sq/<name>` (fp32) and the counters as metadata.

    Moments are absent before the first update, and without an optimiser. The tensors are the trainer's own; each is
    copied only when it is read.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, master in masters.items():
        tensors[f"master/{name}"] = master.detach()
        moments = optimizer.state.get(master, {}) if optimizer else {}
        for moment in MOMENTS:
            if moment in moments:
                tensors[f"{moment}/{name}"] = moments[moment]
    return build(tensors, torch.float32, {"counters": json.dumps(dict(counters), sort_keys=True)})


def parse_state(data: Buffer, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Tensors by their name in the file, and the counters.

    Args:
        shapes: shapes of the masters.

    Raises:
        ModelError: a tensor is missing, unexpected, not finite, or of another shape or dtype than this adapter's.
    """
    view = memoryview(data).cast("B")
    try:
        tensors = parse(view, where=PART)
    except KeyError as error:
        raise ModelError(f"unreadable: a tensor has dtype {error}", where=PART) from None
    counters: dict[str, int] = json.loads(parse_header(view, size=view.nbytes, where=PART).metadata["counters"])
    kinds = ("master", *(MOMENTS if counters["updates"] else ()))
    wanted = {f"{kind}/{name}": shape for kind in kinds for name, shape in shapes.items()}
    check_tensors(PART, tensors, wanted, torch.float32)
    return tensors, counters


def unpack_state(
    data: Buffer, masters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer | None
) -> dict[str, int]:
    """Writes tensors back in place; returns the counters.

    Raises:
        ModelError: as for `parse_state`; nothing was changed.
    """
    tensors, counters = parse_state(data, {name: tuple(master.shape) for name, master in masters.items()})
    with torch.no_grad():
        for name, master in masters.items():
            master.copy_(tensors[f"master/{name}"])
            if optimizer and counters["updates"]:
                # Beside its master: fused AdamW on a GPU refuses a counter that is on the CPU.
                step = torch.tensor(float(counters["updates"]), dtype=torch.float32, device=master.device)
                moments = {moment: tensors[f"{moment}/{name}"].to(master.device).clone() for moment in MOMENTS}
                optimizer.state[master] = {"step": step, **moments}
            elif optimizer:
                # The state before the first update.
                optimizer.state.pop(master, None)
    return counters
