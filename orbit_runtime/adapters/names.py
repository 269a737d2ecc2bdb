"""Names of an adapter's tensors in files, and how an expert layer's stacked tensors are split among them.

    dense                     `<module>.<kind>`
    experts, PerExpert        `….experts.<e>.gate_proj.<kind>`, one per expert: PEFT's names for experts as modules
    experts, SharedOuter      `….experts.w1.<kind>` `[E or 1, …]`: engines' names for gate (w1), up (w3) and down (w2)
    experts, Shared           the same names, `[1, …]`

Belongs here: names. Does not belong here: values, bytes (`state`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

STACKED_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LAYER_NAMES = {short: name for name, short in STACKED_NAMES.items()}
_ONE_EXPERT = re.compile(r"(?P<layer>(?:.*\.)?experts)\.(?P<expert>\d+)\.(?P<leaf>[^.]+)")


def expert_file_names(module: str, kind: str, layout: str, num_experts: int) -> tuple[str, ...]:
    """Names of the tensors that make up `<module>.<kind>`, a module of experts such as `….experts.gate_proj`."""
    parent, _, leaf = module.rpartition(".")
    if layout == "PerExpert":
        return tuple(f"{parent}.{index}.{leaf}.{kind}" for index in range(num_experts))
    return (f"{parent}.{STACKED_NAMES.get(leaf, leaf)}.{kind}",)


def is_outer(layer: str, kind: str) -> bool:
    """Whether this side of a layer of experts faces the hidden state: the side that `SharedOuter` shares."""
    reads_tokens = not layer.endswith(".down_proj")
    return reads_tokens != (kind == "lora_B")


def layer_of(module: str, *, is_stacked: bool) -> tuple[str, int | None]:
    """(layer, expert) of a module as a file names it: the inverse of `expert_file_names`; expert None for all of them,
    or for a dense layer.

    Args:
        is_stacked: whether the module's tensors have an axis of experts.
    """
    if is_stacked:
        parent, _, leaf = module.rpartition(".")
        return f"{parent}.{_LAYER_NAMES.get(leaf, leaf)}", None
    found = _ONE_EXPERT.fullmatch(module)
    return (f"{found['layer']}.{found['leaf']}", int(found["expert"])) if found else (module, None)


def split_tensor(names: tuple[str, ...], tensor: Tensor) -> dict[str, Tensor]:
    """The tensor by file name: split along the experts if each has a name of its own."""
    return {names[0]: tensor} if len(names) == 1 else dict(zip(names, tensor.unbind(0), strict=True))


def join_tensors(names: tuple[str, ...], tensors: Mapping[str, Tensor]) -> Tensor:
    """The inverse of `split_tensor`."""
    import torch

    return tensors[names[0]] if len(names) == 1 else torch.stack([tensors[name] for name in names])
