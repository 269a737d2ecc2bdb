"""What the pinned versions support together: format x family x adapter x engine x trainer, with a reason per limit.

Belongs here: one row per limit; everything else is supported. Does not belong here: memory, or checking a file.

A row is `refused` if a pinned version cannot do it, `missing` if this version of Orbit lacks the part that would, and
`planned` if the code exists but has not run on the hardware or files for which it is meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from orbit_runtime.workers.servers.process import PINNED_SGLANG

State = Literal["works", "planned", "missing", "refused"]
PINNED = {"sglang": PINNED_SGLANG, "megatron-core": "0.19.2", "torch": "2.14.1", "transformers": "5.19.0"}
"""Versions to which the rows apply; a test compares them with `images/constraints`."""

MOE_FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3", "kimi_k2", "deepseek_v4", "gpt_oss")
FAMILY_NAMES = ("qwen3", "llama", *MOE_FAMILIES)
EXPERT_LAYOUTS = ("SharedOuter", "Shared", "PerExpert", "None")
FORMATS = ("BF16", "FP8", "INT4", "NVFP4", "MXFP4")
"""Formats that `quant`, and so the torch trainer and engine, can read; a test compares them with its table."""


@dataclass(frozen=True, slots=True)
class Combination:
    """Example: `Combination("INT4", "kimi_k2", "LoRA", "SharedOuter", "SGLang", "Megatron", 8)`."""

    format: str
    family: str
    adapter: str
    experts: str
    engine: str
    trainer: str
    num_gpus: int = 1
    """0 for the CPU."""
    deterministic: bool = False
    adapts_down: bool = True
    """Whether `down_proj` is among the targets."""
    gpu: str = ""
    """Short name of the card (`model_info.gpus`); empty if unknown."""
    teacher: bool = False
    """Whether the algorithm has a teacher that ranks cannot ask."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Every field that is set must match; an empty field matches anything."""

    state: State
    reason: str
    fix: str = ""
    where: str = ""
    """The field under `spec` that the fix names first, for a refusal."""
    format: tuple[str, ...] = ()
    family: tuple[str, ...] = ()
    adapter: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    trainer: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    several_gpus: bool = False
    on_gpu: bool = False
    on_cpu: bool = False
    deterministic: bool = False
    """Only if the manifest requests determinism."""
    adapts_down: bool = False
    """Only with `down_proj`."""
    teacher: bool = False
    """Only with a teacher that ranks cannot ask."""

    def matches(self, asked: Combination) -> bool:
        names = ("format", "family", "adapter", "experts", "engine", "trainer", "gpu")
        fits = all(not getattr(self, name) or getattr(asked, name) in getattr(self, name) for name in names)
        fits = fits and not (self.on_cpu and asked.num_gpus) and not (self.deterministic and not asked.deterministic)
        fits = fits and not (self.adapts_down and not asked.adapts_down)
        fits = fits and not (self.teacher and not asked.teacher)
        return fits and asked.num_gpus >= (2 if self.several_gpus else 1 if self.on_gpu else 0)


LIMITS: tuple[Limit, ...] = (
    Limit(
        "refused", "SGLang 0.5.23 computes the attention of gpt-oss and of DeepSeek-V4 on GPUs only",
        "write rollout.engine: Torch", "rollout.engine",
        family=("gpt_oss", "deepseek_v4"), engine=("SGLang",), on_cpu=True,
    ),
    Limit(
        "refused",
        "SGLang 0.5.23 serves no LoRA on MXFP4 experts",
        "write adapter.experts: None, or adapter.type: OFT", "adapter.experts",
        format=("MXFP4",), family=tuple(name for name in MOE_FAMILIES if name != "deepseek_v4"), adapter=("LoRA",),
        experts=("SharedOuter", "Shared", "PerExpert"), engine=("SGLang",), on_gpu=True,
    ),
    Limit(
        "refused",
        "LoRA on DeepSeek-V4's FP4 experts needs SGLang's Marlin kernels, which run on Hopper and on SM120 only",
        "write adapter.experts: None, or adapter.type: OFT", "adapter.experts",
        format=("MXFP4",), family=("deepseek_v4",), adapter=("LoRA",), experts=("SharedOuter", "PerExpert"),
        engine=("SGLang",), gpu=("B200", "A100", "RTX4090"),
    ),
    Limit(
        "refused", "SGLang 0.5.23 supports no LoRA on the experts of gpt-oss, whose gate and up are one tensor",
        "write adapter.experts: None, or adapter.type: OFT", "adapter.experts",
        family=("gpt_oss",), adapter=("LoRA",), experts=("SharedOuter", "Shared", "PerExpert"), engine=("SGLang",),
    ),
    Limit(
        "refused", "SGLang 0.5.23 supports LoRA of routed experts shared on the outer side, or one for each",
        "write adapter.experts: SharedOuter", "adapter.experts",
        adapter=("LoRA",), experts=("Shared",), engine=("SGLang",),
    ),
    Limit(
        "refused", "in SGLang tokens are rotated before they are sent to their experts, so all experts share one R",
        "write adapter.experts: Shared", "adapter.experts",
        adapter=("OFT",), experts=("SharedOuter", "PerExpert"), engine=("SGLang",),
    ),
    Limit(
        "refused", "SGLang computes routed experts in one kernel on a GPU: no R can be applied before their down_proj",
        "leave down_proj out of adapter.targets, or write adapter.experts: None", "adapter.targets",
        adapter=("OFT",), experts=("Shared",), engine=("SGLang",), on_gpu=True, adapts_down=True,
    ),
    Limit(
        "refused", "SGLang 0.5.23 samples deterministically on GPUs only",
        "remove rollout.deterministic, or write rollout.engine: Torch", "rollout.deterministic",
        engine=("SGLang",), on_cpu=True, deterministic=True,
    ),
    Limit(
        "refused", "SGLang 0.5.23 has no deterministic attention for DeepSeek-V4",
        "remove rollout.deterministic, or write rollout.engine: Torch", "rollout.deterministic",
        family=("deepseek_v4",), engine=("SGLang",), deterministic=True,
    ),
    Limit(
        "refused", "the torch engine runs in the torch trainer's process",
        "write rollout.engine: Auto", "rollout.engine",
        engine=("Torch",), trainer=("Megatron",),
    ),
    Limit(
        "refused", "Orbit reads the experts of gpt-oss in MXFP4, as released, and in BF16",
        "point model.uri at the released checkpoint", "model.uri", format=("INT4", "FP8", "NVFP4"), family=("gpt_oss",),
    ),
    Limit(
        "refused", "Orbit reads DeepSeek-V4 in FP4 and FP8, as released, and in BF16",
        "point model.uri at the released checkpoint", "model.uri", format=("INT4", "NVFP4"), family=("deepseek_v4",),
    ),
    Limit(
        "refused", "adapters of routed experts are not sent to attached servers in this version",
        "write adapter.experts: None", "adapter.experts",
        experts=("SharedOuter", "Shared", "PerExpert"), engine=("OpenAI",),
    ),
    Limit(
        "missing", "this version does not divide the attention of DeepSeek-V4 among GPUs: it keeps a state of its own",
        "write training.trainer: Torch where one GPU is enough", "training.trainer",
        family=("deepseek_v4",), trainer=("Megatron",),
    ),
    Limit(
        "missing", "ranks hold neither a second adapter nor another distribution: their teacher is the base by sampled "
        "tokens, or a served model",
        "write training.trainer: Torch where one GPU is enough, or algorithm.teacher: {type: Base, over: Sampled}",
        "training.trainer",
        trainer=("Megatron",), teacher=True,
    ),
    Limit(
        "planned", "ranks that hold a model in parts have run on CPUs, not on hardware",
        trainer=("Megatron",), on_gpu=True,
    ),
    Limit(
        "planned",
        "DeepSeek-V4's attention is adapted by Orbit's plug-in: tested module by module on a CPU, not run on hardware",
        family=("deepseek_v4",), engine=("SGLang",),
    ),
    Limit(
        "planned",
        "LoRA on DeepSeek-V4's FP4 experts is Orbit's plug-in over SGLang's Marlin kernels (Hopper, SM120), not run on "
        "hardware",
        format=("MXFP4",), family=("deepseek_v4",), adapter=("LoRA",), experts=("SharedOuter", "PerExpert"),
        engine=("SGLang",),
    ),
    Limit("planned", "Orbit has attached dense models only", family=MOE_FAMILIES, engine=("OpenAI",)),
    Limit("planned", "SGLang on a GPU is written and not run on hardware", engine=("SGLang",), on_gpu=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Support:
    state: State
    reasons: tuple[str, ...] = ()
    fix: str = ""
    where: str = ""
    """A field under `spec`."""


def find_support(asked: Combination) -> Support:
    """The worst state of all limits that match, and the reasons for it."""
    found = [limit for limit in LIMITS if limit.matches(asked)]
    for state in ("refused", "missing", "planned"):
        of_state = [limit for limit in found if limit.state == state]
        if of_state:
            first, reasons = of_state[0], tuple(each.reason for each in of_state)
            return Support(first.state, reasons, first.fix, first.where)
    return Support("works")


def all_combinations() -> Iterator[Combination]:
    """The table's combinations: torch alone on one device, with SGLang on a CPU, Megatron with SGLang on 8 GPUs."""
    for engine, trainer, gpus in (("Torch", "Torch", 1), ("SGLang", "Torch", 0), ("SGLang", "Megatron", 8)):
        for family in FAMILY_NAMES:
            for form in FORMATS:
                for adapter in ("LoRA", "OFT"):
                    for experts in (
                        ("SharedOuter", "Shared", "PerExpert", "None") if family in MOE_FAMILIES else ("None",)
                    ):
                        yield Combination(form, family, adapter, experts, engine, trainer, gpus)
