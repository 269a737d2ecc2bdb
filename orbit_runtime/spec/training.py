"""`spec.training`: how the adapter changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from orbit_runtime.spec.block import DISPLAY, IDENTITY, LATER_DISPLAY, LAYOUT, Block, Rule

LONG_SEQUENCE = 8192
"""Tokens from which masks of attention take more memory than all else that a layer keeps."""


USUAL_RATES: tuple[tuple[float, Mapping[str, float]], ...] = (
    (10_000_000, {"LoRA": 2e-3, "OFT": 1e-3}),
    (1_000_000_000, {"LoRA": 5e-4, "OFT": 1e-3}),
)
"""Most parameters of a model, and the rates by which one below it was measured to learn: docs/guides/real_model.md."""
CAUTIOUS_RATE = 1e-4
"""For whatever was not measured. One that is too low is told in the report; one that is too high ruins a run."""


def usual_rate(adapter: str, num_parameters: float) -> float:
    """The learning rate of a run whose manifest names none."""
    fitting = (rates for most, rates in USUAL_RATES if num_parameters <= most)
    return next(fitting, {}).get(adapter, CAUTIOUS_RATE)


class Schedule(Block):
    """The learning rate over the steps."""

    type: Annotated[Literal["Constant", "Linear", "Cosine"], IDENTITY] = "Constant"
    """Course of the rate after the warm-up: constant, or falling to 0 at `decaySteps`."""
    warmup_steps: Annotated[int, IDENTITY, Field(ge=0, le=100_000_000)] = 0
    """Steps over which the rate rises from 0 to `learningRate`."""
    decay_steps: Annotated[int | None, IDENTITY, Field(ge=1, le=100_000_000)] = None
    """Step at which `Linear` and `Cosine` reach 0; if unset, `steps` as it was at the first start."""

    rules = (
        Rule(
            "decaySteps",
            "self.type != 'Constant' || !has(self.decaySteps)",
            "a `Constant` rate does not decay, so this field does nothing",
            "remove `decaySteps`, or write `type: Linear` or `type: Cosine`",
        ),
        Rule(
            "decaySteps",
            "self.type == 'Constant' || !has(self.decaySteps) || self.decaySteps > self.warmupSteps",
            "{self.decay_steps} is not after the warm-up, which ends at step {self.warmup_steps}",
            "write `decaySteps: {more}` or more, or a shorter warm-up",
            more=lambda self: self.warmup_steps + 1,
            server="write a later step, or a shorter warm-up",
        ),
    )


class Parallel(Block):
    """How a model and its samples are divided among ranks, one process for each GPU. If a size is unset, the planner
    chooses it; on the CPU, which has as many ranks as these sizes need, an unset size is 1."""

    tensor: Annotated[int | None, LAYOUT, Field(ge=1, le=1024)] = None
    """Number of parts into which matrices are divided, except those of experts; it must divide the number of heads."""
    expert: Annotated[int | None, LAYOUT, Field(ge=1, le=1024)] = None
    """Number of parts into which the experts of a layer are divided; it must divide their number."""
    pipeline: Annotated[int | None, LAYOUT, Field(ge=1, le=1024)] = None
    """Number of stages, each with a run of consecutive layers. Stages work on different micro-batches at a time, so a
    step should have several for each stage."""
    context: Annotated[int | None, LAYOUT, Field(ge=1, le=1024)] = None
    """Number of parts into which the tokens of a micro-batch are divided, except keys and values: for sequences too
    long for one GPU."""
    data: Annotated[int | None, LAYOUT, Field(ge=1, le=1024)] = None
    """Number of replicas, which train on different samples of a step. If unset, what remains of the GPUs; on the CPU 1,
    or as many as `expert` needs."""


def _near_divisor(number: int, wanted: int) -> int:
    divisors = [each for each in range(1, min(number, 4096) + 1) if number % each == 0]
    return min(divisors, key=lambda each: (abs(each - wanted), each))


class StopWhen(Block):
    """The run ends before its last step, as done, once an evaluation has shown enough, or shows no more gain. A score
    that is no number is neither."""

    evaluation: Annotated[str | None, LATER_DISPLAY, Field(min_length=1, max_length=63, examples=["held-out"])] = None
    """Name of the one of `evaluation.environments` that decides; if unset, the first. With `algorithm.type: SFT` it is
    `held-out`, the demonstrations that `data.validation` holds out."""
    metric: Annotated[Literal["Mean", "PassAt"], LATER_DISPLAY] = "Mean"
    """`Mean` is the mean reward of a prompt's samples, `PassAt` the share of prompts of which a sample passes. With
    `algorithm.type: SFT` the mean is the log-prob of a token, which is minus the held-out loss."""
    at_least: Annotated[float | None, LATER_DISPLAY, Field(ge=-1_000_000, le=1_000_000, examples=[0.9])] = None
    """End as soon as an evaluation has found this value or a higher one."""
    without_gain_steps: Annotated[int | None, LATER_DISPLAY, Field(ge=1, le=100_000_000, examples=[50])] = None
    """End at an evaluation that comes this many steps, or more, after the best one."""

    rules = (
        Rule(
            "",
            "has(self.atLeast) != has(self.withoutGainSteps)",
            "needs either `atLeast` or `withoutGainSteps`",
            "write one of them: a value that is enough, or a number of steps without a better one",
        ),
    )


class Training(Block):
    """Batches and the optimiser (AdamW)."""

    trainer: Annotated[Literal["Auto", "Torch", "Megatron"], LAYOUT] = "Auto"
    """`Torch` is one process with the whole model. `Megatron` is ranks that each hold a part of it, over Megatron-Core,
    with a separate engine. The result is the same up to rounding, and a run may change it on resume. `Auto` is `Torch`
    if one GPU is enough, and on the CPU."""
    steps: Annotated[int, DISPLAY, Field(ge=1, le=100_000_000, examples=[100])]
    """Number of steps of the whole run, each of collect, train, publish and checkpoint. May grow on resume."""
    stop_when: StopWhen | None = None
    """What ends the run earlier; if unset, nothing does."""
    prompts_per_step: Annotated[int, IDENTITY, Field(ge=1, le=1_000_000)] = 32
    """Prompts per step; each is sampled `algorithm.groupSize` times."""
    mini_batch_prompts: Annotated[int | None, IDENTITY, Field(ge=1, le=1_000_000)] = None
    """Prompts per optimiser update; it must divide `promptsPerStep`. If unset, one update per step."""
    update_epochs: Annotated[int, IDENTITY, Field(ge=1, le=1000)] = 1
    """Number of times that a step's samples are trained on."""
    learning_rate: Annotated[float | None, IDENTITY, Field(gt=0, le=1)] = None
    """Peak learning rate; adapters usually take 1e-5 to 2e-3. If unset, the first start takes a rate that was measured
    for the adapter's type and the model's size, or 1e-4; `run.json` keeps it: docs/guides/real_model.md."""
    schedule: Schedule = Schedule()
    """The learning rate over the steps."""
    weight_decay: Annotated[float, IDENTITY, Field(ge=0, le=1)] = 0.0
    """AdamW's decoupled weight decay of the adapter."""
    max_grad_norm: Annotated[float, IDENTITY, Field(gt=0, le=1_000_000)] = 1.0
    """A gradient with a larger norm is scaled down to this norm."""
    micro_batch_tokens: Annotated[int, LAYOUT, Field(ge=1, le=100_000_000)] = 16384
    """Tokens per forward pass; lower it to save memory, the result stays the same."""
    parallel: Parallel = Parallel()
    """How `Megatron` divides the model among ranks."""
    attention: Annotated[Literal["Auto", "Eager", "SDPA", "Chunked"], LAYOUT] = "Auto"
    """Attention kernels: `Eager` is plain matrix products. `SDPA` is torch's fused attention; if completions share a
    prompt, its mask has the size of the sequence length squared. `Chunked` needs no mask, and its memory grows with the
    length. `Auto` is `Chunked` if sequences may have 8192 tokens or more, otherwise `SDPA`. In place of both, a torch
    trainer on a CPU with a C compiler has a kernel of Orbit's own, without a mask."""
    recompute: Annotated[Literal["Auto", "None", "Selective", "PerLayer"], LAYOUT] = "Auto"
    """What the backward pass recomputes to save memory: nothing, everything except products with packed weights, or
    whole layers. `Auto` takes the first of these that fits, according to the plan. The result stays the same."""

    @property
    def decided_rate(self) -> float:
        """`learningRate` of a run that has begun."""
        assert self.learning_rate is not None, "a run decides it once its model is there"
        return self.learning_rate

    def decided_attention(self, max_sequence: int) -> Literal["Eager", "SDPA", "Chunked"]:
        """`Auto` resolved for sequences of at most so many tokens."""
        if self.attention != "Auto":
            return self.attention
        return "Chunked" if max_sequence >= LONG_SEQUENCE else "SDPA"

    rules = (
        Rule(
            "miniBatchPrompts",
            "!has(self.miniBatchPrompts) || self.miniBatchPrompts < 1"
            " || self.promptsPerStep % self.miniBatchPrompts == 0",
            "{self.mini_batch_prompts} does not divide `promptsPerStep` ({self.prompts_per_step})",
            "write `miniBatchPrompts: {more}`, or change `promptsPerStep`",
            more=lambda self: _near_divisor(self.prompts_per_step, self.mini_batch_prompts),
            server="write a divisor of promptsPerStep",
        ),
        Rule(
            "schedule.warmupSteps",
            "self.schedule.type == 'Constant' || has(self.schedule.decaySteps)"
            " || self.schedule.warmupSteps < self.steps",
            "the warm-up ends at step {self.schedule.warmup_steps}, after the last step ({self.steps}), so nothing is"
            " left to decay",
            "write a shorter warm-up, more `steps`, or `type: Constant`",
        ),
    )
