"""Checks `rollout.engineArguments` against the model, the servers' GPUs and the adapter.

Belongs here: arguments that contradict the plan, each with its field. Does not belong here: names and types
(`spec.engine_arguments`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner.job import Job, Machine

FIELD = "spec.rollout.engineArguments"
ON_CPU_OURS = ("attention-backend", "prefill-attention-backend", "decode-attention-backend", "disable-overlap-schedule")
"""Arguments that Orbit sets on a CPU, where SGLang supports only one choice."""
Contradicting = tuple[str, str, str]
"""(argument name, what is wrong, fix)."""


def find_contradictions(model: ModelFacts, job: Job, machine: Machine, size: int) -> Iterator[Contradicting]:
    """Arguments that SGLang would refuse, or that would make it run other than planned.

    Args:
        size: GPUs of each server.
    """
    given = job.engine_arguments
    if not given or job.engine != "SGLang":
        return
    yield from _spread(model, job, size)
    yield from _speculation(model, job)
    if machine.gpu is None:
        for name in ON_CPU_OURS:
            if name in given:
                yield name, f"on a CPU Orbit sets `{name}`", "leave it out"
    elif job.deterministic and (named := [name for name in ON_CPU_OURS[:3] if name in given]):
        yield named[0], "with `rollout.deterministic` SGLang chooses the attention", f"remove `{named[0]}`"


def _spread(model: ModelFacts, job: Job, size: int) -> Iterator[Contradicting]:
    shape, given = model.architecture, job.engine_arguments
    experts: Any = given.get("ep-size", 1)
    if experts > 1 and not shape.num_experts:
        yield "ep-size", f"{model.name} has no routed experts to distribute", "remove `ep-size`"
    elif size % experts:
        yield "ep-size", f"a server's {size} GPUs cannot be divided by {experts}", f"write one of {_divisors(size)}"
    elif experts > 1 and shape.num_experts % experts:
        fits = [each for each in _divisors(size) if shape.num_experts % each == 0]
        yield (
            "ep-size",
            f"{shape.num_experts} experts cannot be distributed over {experts} GPUs",
            f"write one of {fits}",
        )
    elif experts > 1 and job.experts != "None":
        message = "adapters of routed experts are read back if experts are cut, but not if they are distributed"
        yield "ep-size", message, "write adapter.experts: None, or remove `ep-size`"
    groups: Any = given.get("attn-dp-size", 1)
    if size % groups:
        yield "attn-dp-size", f"a server's {size} GPUs cannot be divided by {groups}", f"write one of {_divisors(size)}"
    if given.get("moe-a2a-backend", "none") != "none" and experts == 1:
        yield "moe-a2a-backend", "without `ep-size` no token travels to an expert", "add `ep-size`"
    if given.get("enable-dp-lm-head") and groups == 1:
        yield "enable-dp-lm-head", "it belongs to attention on several groups of GPUs", "add `attn-dp-size`"


def _speculation(model: ModelFacts, job: Job) -> Iterator[Contradicting]:
    given = job.engine_arguments
    algorithm = given.get("speculative-algorithm")
    if algorithm is None:
        if others := [name for name in given if name.startswith("speculative-")]:
            yield others[0], "nothing speculates", "add `speculative-algorithm`"
        return
    name = "speculative-algorithm"
    if algorithm != "NGRAM" and not any(stored.weight.role == "mtp" for stored in model.weights):
        message = f"{model.name} has no layer that guesses the next tokens (MTP), and no second model is fetched"
        yield name, message, "write NGRAM, or remove it"
    if job.deterministic:
        yield (
            name,
            "an accepted guess does not use the request's own seed",
            "remove it, or rollout.deterministic",
        )
    if job.adapter == "OFT":
        yield name, "Orbit's plug-in does not rotate the pass that checks guesses", "use adapter.type: LoRA"


def _divisors(size: int) -> list[int]:
    return [each for each in range(1, size + 1) if size % each == 0]
