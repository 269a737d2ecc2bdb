"""Adapters and arguments of SGLang's servers: what 0.5.23 and Orbit's plug-in cannot apply as the trainer does.

    LoRA, SharedOuter or PerExpert   of routed experts: SGLang's own buffers and, on a GPU, its own kernels, over the
                                     layouts in `LORA_RUNNERS`; on a CPU the plug-in computes them from the same buffers
    OFT, Shared                      the plug-in rotates tokens before the experts, over any base; R of down on a CPU

Belongs here: rows about one adapter in one kind of server, and `rollout.engineArguments` that contradict the plan. Does
not belong here: names and types of arguments (`spec.engine_arguments`), rows about kinds alone (`combinations`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from orbit_runtime.model_info.weights import EXPERT, SGLANG_TARGETS, SHARED_INPUTS, ModelFacts, Weight
from orbit_runtime.planner.adapter_size import LEFT_OUT, adapted_weights
from orbit_runtime.planner.job import Job, Machine
from orbit_runtime.planner.support import Problem, SupportRow, Words, check_rows, find_problems
from orbit_runtime.planner.support.combinations import Combination, check_combination
from orbit_runtime.planner.support.kernels import LORA_RUNNERS, expert_layouts

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
LORA_LAYOUTS = ("SharedOuter", "PerExpert")
UNNAMED = (".compressor.", ".indexer.")
"""Parts of DeepSeek-V4's attention whose linears SGLang matches by no target."""

Place = Literal["CPU", "GPU", "attached"]
"""Location of the servers."""


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """One adapter, and the servers that shall apply it. Example: a LoRA of the attention of a dense model on a CPU."""

    type: str
    experts: str
    """How routed experts share it: `SharedOuter` …"""
    rank: int
    scaling: float
    rslora: bool
    layers: tuple[str, ...]
    """Names of the adapted modules; all experts of a layer are one."""
    modules: Collection[str]
    """Names of all modules."""
    layouts: tuple[str, ...]
    """Layouts of the adapted routed experts, as `quant` names them."""
    place: Place
    capability: tuple[int, int] | None = None
    """The GPU's CUDA compute capability; None if unknown, and elsewhere."""
    deterministic: bool = False

    @property
    def expert_targets(self) -> set[str]:
        return {last_part(name) for name in self.layers if ".experts." in name}

    @property
    def by_lora(self) -> bool:
        """Whether routed experts have a LoRA."""
        return self.type == "LoRA" and bool(self.expert_targets)

    @property
    def combination(self) -> Combination:
        """The combination for rows about kinds of engines; the family and the format are not known here."""
        packed = "MXFP4" if "MXFP4V4" in self.layouts and self.place == "GPU" else ""
        return Combination(
            packed, "deepseek_v4" if packed else "", self.type, served_experts(self.experts, self.layers),
            "OpenAI" if self.place == "attached" else "SGLang", "", int(self.place == "GPU"),
            self.deterministic, adapts_down="down_proj" in self.expert_targets, capability=self.capability,
        )  # fmt: skip


def served_experts(experts: str, layers: Collection[str]) -> str:
    """The layout of an adapter's part on routed experts; `None` if it has no such part."""
    return experts if any(".experts." in name for name in layers) else "None"


def last_part(name: str) -> str:
    return name.rpartition(".")[2]


def module_name(weight: Weight) -> str:
    """The name that a loaded policy gives it: all experts of a layer are one module."""
    parent, _, leaf = weight.module.replace(f".{EXPERT}.", ".").rpartition(".")
    name = last_part(weight.target) or leaf
    return f"{parent}.{name}" if parent else name


def _split_siblings(asked: ServedAdapter) -> Words | None:
    layers = set(asked.layers)
    for name in asked.layers:
        parent, _, last = name.rpartition(".")
        for group in SHARED_INPUTS:
            if last not in group:
                continue
            siblings = [each for each in group if f"{parent}.{each}" in asked.modules]
            if missing := [each for each in siblings if f"{parent}.{each}" not in layers]:
                words = {"missing": " and ".join(missing), "listed": ", ".join(missing), "parent": parent}
                return {"siblings": " and ".join(siblings), **words}
    return None


def _left_out(asked: ServedAdapter) -> Words | None:
    targets, layers = {last_part(name) for name in asked.layers}, set(asked.layers)
    others = {name for name in asked.modules if last_part(name) in targets and ".experts." not in name}
    others = {name for name in others - layers if not any(part in name for part in UNNAMED)}
    return {"last": last_part(min(others)), "module": min(others)} if others else None


def _plugins_own(asked: ServedAdapter) -> Words | None:
    own = sorted({last_part(name) for name in asked.layers} & SGLANG_TARGETS.keys())
    return {"own": ", ".join(own)} if own and asked.place == "attached" else None


def _lacks_projections(asked: ServedAdapter) -> Words | None:
    missing = ", ".join(name for name in PROJECTIONS if name not in asked.expert_targets)
    return {"missing": missing} if asked.by_lora and missing else None


def _is_rounded(asked: ServedAdapter) -> Words | None:
    if not asked.by_lora or math.frexp(asked.scaling)[0] == 0.5:
        return None
    return {"scaling": f"{asked.scaling:g}", "rank": asked.rank, "double": 2 * asked.rank}


def _dense_alone(asked: ServedAdapter) -> Words | None:
    dense = {last_part(name) for name in asked.layers} - asked.expert_targets
    left_out = ", ".join(name for name in PROJECTIONS if name in dense)
    return {"left_out": left_out} if asked.expert_targets and left_out else None


def _without_kernel(asked: ServedAdapter) -> Words | None:
    unknown = sorted(set(asked.layouts) - LORA_RUNNERS.keys())
    if not asked.by_lora or asked.place != "GPU" or not unknown:
        return None
    return {"unknown": ", ".join(dict.fromkeys(UNADAPTABLE.get(layout, layout) for layout in unknown))}


def _two_runners(asked: ServedAdapter) -> Words | None:
    runners = {LORA_RUNNERS.get(layout) for layout in asked.layouts}
    is_mixed = asked.by_lora and asked.place == "GPU" and None not in runners and len(runners) > 1
    return {"layouts": ", ".join(sorted(asked.layouts))} if is_mixed else None


UNADAPTABLE = {
    **dict.fromkeys(("FP8", "FP8BlockCT"), "FP8 that is not in blocks of its original publisher's"),
    "NVFP4": "NVFP4 of compressed-tensors",
}
"""Layout → description, if its name alone does not show what is wrong with it."""
LAYERS: tuple[SupportRow[ServedAdapter], ...] = (
    SupportRow("adapter.lora.rslora", "SGLang", lambda asked: asked.type == "LoRA" and asked.rslora,
        "SGLang scales a LoRA by alpha / rank", "leave it out"),
    SupportRow("adapter.targets", "SGLang", _split_siblings,
        "SGLang runs {siblings} as one layer, and {missing} of {parent} has no adapter",
        "add {listed}, or use engine: Torch"),
    SupportRow("adapter.targets", "SGLang", _left_out,
        "SGLang adapts every {last} of a model, and {module} has no adapter", "write {last}, or use engine: Torch"),
    SupportRow("adapter.targets", "attached servers", _plugins_own,
        "{own} of DeepSeek-V4 are adapted by Orbit's plug-in, in servers that Orbit starts",
        "write rollout.engine: SGLang, or targets: [gate_proj, up_proj]"),
    SupportRow("adapter.targets", "LoRA on routed experts in SGLang", _lacks_projections,
        "SGLang adapts gate_proj, up_proj and down_proj of routed experts together, and {missing} has no adapter",
        "add {missing}, or write adapter.experts: None"),
    SupportRow("adapter.lora.alpha", "LoRA on routed experts in SGLang", _is_rounded,
        "SGLang multiplies B of routed experts by alpha / rank, here {scaling}, and rounds it to BF16: only a power of "
        "two keeps the published values", "write {rank} or {double}"),
    SupportRow("adapter.targets", "adapters of routed experts in SGLang", _dense_alone,
        "SGLang matches targets by their last name alone: with {left_out} in other layers, experts need it too",
        "write {left_out} for all, or adapter.experts: None"),
    SupportRow("adapter.experts", "LoRA on routed experts in SGLang on a GPU", _without_kernel,
        "SGLang 0.5.23 has no LoRA on routed experts in {unknown}",
        "write None, or adapter.type: OFT, or use another checkpoint"),
    SupportRow("adapter.experts", "LoRA on routed experts in SGLang on a GPU", _two_runners,
        "the experts are packed as {layouts}, and a server of SGLang has one runner for all",
        "write None, or another checkpoint's address in model.uri"),
)  # fmt: skip


def check_served(asked: ServedAdapter) -> None:
    """Raises UnsupportedError (78) for an adapter that the servers cannot apply as the trainer does."""
    check_combination(asked.combination)
    check_rows(LAYERS, asked)


def served_problems(model: ModelFacts, job: Job, machine: Machine) -> Iterator[Problem]:
    """Parts of a manifest's adapter that the servers cannot apply, by the headers of its checkpoint."""
    if job.in_process or job.spec.adapter.type == "Full" or not job.samples:
        return iter(())
    adapted, lora = adapted_weights(model.architecture, job), job.spec.adapter.lora
    scaling = lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank) if lora else 1.0
    linears = [each for each in model.architecture.weights if each.is_linear and each.role not in LEFT_OUT]
    has_experts = any(weight.role == "routed_expert" for weight in adapted)
    return find_problems(LAYERS, ServedAdapter(
        job.spec.adapter.type, job.experts, job.rank, scaling, lora is not None and lora.rslora,
        tuple(dict.fromkeys(module_name(weight) for weight in adapted)), {module_name(weight) for weight in linears},
        expert_layouts(model) if has_experts else (),
        "attached" if job.is_elsewhere else "GPU" if machine.gpu else "CPU",
        machine.gpu.capability if machine.gpu else None,
    ))  # fmt: skip


ON_CPU_OURS = ("attention-backend", "prefill-attention-backend", "decode-attention-backend", "disable-overlap-schedule")
"""Arguments that Orbit sets on a CPU, where SGLang supports only one choice."""
Contradicting = tuple[str, str, str]
"""(argument name, what is wrong, fix)."""


def argument_problems(model: ModelFacts, job: Job, machine: Machine, size: int) -> Iterator[Problem]:
    """Arguments that SGLang would refuse, or that would make it run other than planned.

    Args:
        size: GPUs of each server.
    """
    if job.engine_arguments and job.engine == "SGLang":
        for name, message, fix in _contradicting(model, job, machine, size):
            yield Problem(message, f"spec.rollout.engineArguments.{name}", fix)


def _contradicting(model: ModelFacts, job: Job, machine: Machine, size: int) -> Iterator[Contradicting]:
    given = job.engine_arguments
    yield from _spread(model, job, size)
    yield from _speculation(model, job)
    if machine.gpu is None:
        for name in ON_CPU_OURS:
            if name in given:
                yield name, f"on a CPU Orbit sets `{name}`", "leave it out"
    elif job.spec.rollout.deterministic and (named := [name for name in ON_CPU_OURS[:3] if name in given]):
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
    if job.spec.rollout.deterministic:
        yield (
            name,
            "an accepted guess does not use the request's own seed",
            "remove it, or rollout.deterministic",
        )
    if job.spec.adapter.type == "OFT":
        yield name, "Orbit's plug-in does not rotate the pass that checks guesses", "use adapter.type: LoRA"


def _divisors(size: int) -> list[int]:
    return [each for each in range(1, size + 1) if size % each == 0]
