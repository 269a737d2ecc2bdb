"""Parallel layouts: which are possible for a model on so many GPUs, in the order in which they are preferred.

Belongs here: divisibility and preference. Does not belong here: bytes (`parts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orbit_runtime.model_info.weights import Architecture
from orbit_runtime.planner.job import Asked


@dataclass(frozen=True, slots=True)
class Layout:
    """Example: `Layout(tensor=8, expert=8)` on eight GPUs: one replica, every matrix and every layer's experts in 8."""

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1

    @property
    def num_gpus(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    def text(self) -> str:
        return f"TP{self.tensor} EP{self.expert} PP{self.pipeline} CP{self.context} DP{self.data}"


def possible_layouts(model: Architecture, num_gpus: int, asked: Asked) -> Iterator[Layout]:
    """Least divided first: what is not divided needs no communication, and replicas multiply the throughput.

    Experts are always divided as far as they go, because routed tokens travel anyway. The layers are divided only where
    the manifest says so: within one node dividing matrices costs less.
    """
    for context in _choices(asked.context, num_gpus, most=num_gpus):
        for pipeline in [asked.pipeline or 1]:
            for tensor in _choices(asked.tensor, num_gpus, most=num_gpus):
                group = tensor * pipeline * context
                if num_gpus % group or model.num_heads % tensor or pipeline > model.num_layers:
                    continue
                expert = asked.expert or _widest(model.num_experts, num_gpus // pipeline)
                if model.num_experts and (model.num_experts % expert or (num_gpus // pipeline) % expert):
                    continue
                yield Layout(tensor, expert, pipeline, context, num_gpus // group)


def _choices(asked: int | None, num_gpus: int, *, most: int) -> list[int]:
    return [asked] if asked else [size for size in range(1, most + 1) if num_gpus % size == 0]


def _widest(num_experts: int, num_gpus: int) -> int:
    """1 for a model without experts, which any number would divide."""
    fitting = (size for size in range(1, num_gpus + 1) if num_gpus % size == 0 and num_experts % size == 0)
    return max(fitting) if num_experts else 1
