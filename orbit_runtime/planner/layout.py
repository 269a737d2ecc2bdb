"""Parallel layouts that are possible for a model on a number of GPUs, in order of preference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from orbit_runtime.model_info.weights import ModelFacts, StoredWeight
from orbit_runtime.planner.adapter_size import CUT_BY_COLUMNS, DIVIDED
from orbit_runtime.planner.job import Job
from orbit_runtime.spec.training import Parallel

KEYS = ("k_proj", "v_proj")


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

    @property
    def token_sets(self) -> int:
        """Number of parts into which the tokens of ranks that divide the same experts are divided."""
        return max(1, self.expert // self.tensor)


def requested_layout(asked: Parallel) -> Layout:
    """The layout on the CPU, with as many ranks as the sizes need. Sizes not set are 1."""
    tensor, pipeline, context = asked.tensor or 1, asked.pipeline or 1, asked.context or 1
    # If matrices are cut into parts, experts must be divided into at least as many.
    expert = asked.expert or tensor
    # As few copies as give each part of the experts whole ranks.
    data = asked.data or expert // gcd(expert, tensor * context)
    return Layout(tensor, expert, pipeline, context, data)


def possible_layouts(model: ModelFacts, num_gpus: int, job: Job) -> Iterator[Layout]:
    """Yields layouts, least divided first: undivided parts need no communication, and replicas multiply the throughput.

    Experts are always divided as far as possible, because routed tokens travel anyway. Layers and sequences are divided
    only if the manifest says so.
    """
    asked, num_experts = job.spec.training.parallel, model.architecture.num_experts
    pipeline, context = asked.pipeline or 1, asked.context or 1
    for tensor in [asked.tensor] if asked.tensor else _divisors(num_gpus):
        group = tensor * pipeline * context
        if num_gpus % group or (asked.data or num_gpus // group) != num_gpus // group:
            continue
        widest = [asked.expert] if asked.expert else _divisors(num_gpus // pipeline)[::-1] if num_experts else [1]
        layouts = (Layout(tensor, expert, pipeline, context, num_gpus // group) for expert in widest)
        yield from [layout for layout in layouts if objection(model, job, layout) is None][:1]


def objection(model: ModelFacts, job: Job, layout: Layout) -> str | None:
    """Why the model cannot be divided like this; None if it can."""
    return next(_objections(model, job, layout), None)


def _objections(model: ModelFacts, job: Job, layout: Layout) -> Iterator[str]:
    shape, tensor, expert = model.architecture, layout.tensor, layout.expert
    if shape.num_heads % tensor:
        yield f"{shape.num_heads} attention heads cannot be divided among {tensor} ranks"
    if any(weight.target in KEYS for weight in shape.weights) and shape.kv.heads % tensor:
        yield f"{shape.kv.heads} heads of keys and values cannot be divided among {tensor} ranks"
    if layout.pipeline > shape.num_layers:
        yield f"{shape.num_layers} layers cannot be divided into {layout.pipeline} stages"
    if shape.num_experts and shape.num_experts % expert:
        yield f"{shape.num_experts} experts cannot be divided among {expert} ranks"
    if shape.num_experts and (expert % tensor or (layout.num_gpus // layout.pipeline) % expert):
        yield (
            f"experts in {expert} parts and matrices in {tensor} do not fit {layout.num_gpus} ranks: the experts' "
            "number must be a multiple of the matrices' and divide the ranks"
        )
    for stored in model.weights if tensor > 1 else ():
        if stored.weight.is_linear and stored.weight.is_split and stored.weight.role in DIVIDED:
            yield from _cuts(stored, tensor, job)


def _cuts(stored: StoredWeight, tensor: int, job: Job) -> Iterator[str]:
    weight, by_columns = stored.weight, stored.weight.target in CUT_BY_COLUMNS
    width = weight.shape[1 if by_columns else 0]
    side = "columns" if by_columns else "rows"
    if width % tensor:
        yield f"the {width} {side} of {weight.module} cannot be divided by {tensor}"
        return
    block = stored.block[1 if by_columns else 0] if stored.block else 1
    if width // tensor % block:
        yield f"each of {tensor} ranks would have {width // tensor} {side} of {weight.module}, a scale covers {block}"
    if by_columns and job.spec.adapter.type == "OFT" and width // tensor % job.rank:
        yield (
            f"each of {tensor} ranks would have {width // tensor} inputs of {weight.module}, but OFT's blocks have "
            f"{job.rank}"
        )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
