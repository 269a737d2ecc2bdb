"""Combinations that the pinned versions support: format x family x adapter x engine x trainer, with a reason per limit.

Belongs here: one row per limit; what the tests compare works otherwise. Does not belong here: memory, checking a file.
"""

from __future__ import annotations

from dataclasses import dataclass

from orbit_runtime.model_info.module_tree import shipped_record
from orbit_runtime.planner.support import State, SupportRow, check_rows
from orbit_runtime.workers.servers.process import PINNED_SGLANG

PINNED = {"sglang": PINNED_SGLANG, "megatron-core": "0.19.2", "torch": "2.14.1", "transformers": "5.19.0"}
"""Versions to which the rows apply; a test compares them with `images/constraints`."""

MARLIN_FP4 = (9, 12)
"""Major compute capabilities on which SGLang multiplies DeepSeek-V4's FP4 experts with Marlin."""
MOE_FAMILIES = ("qwen3_moe", "glm4_moe", "deepseek_v3", "kimi_k2", "deepseek_v4", "gpt_oss")
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
    capability: tuple[int, int] | None = None
    """The GPU's CUDA compute capability; None if unknown, and on a CPU."""
    teacher: bool = False
    """Whether the algorithm has a teacher that ranks cannot ask."""
    fp32: bool = False
    """Whether the manifest asks to compute in FP32."""


@dataclass(frozen=True, slots=True)
class RowCondition:
    """Condition of a row: every field that is set must match; an empty field matches anything."""

    format: tuple[str, ...] = ()
    family: tuple[str, ...] = ()
    adapter: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    trainer: tuple[str, ...] = ()
    several_gpus: bool = False
    on_gpu: bool = False
    on_cpu: bool = False
    without_marlin_fp4: bool = False
    """Matches only a GPU whose compute capability is known, and not one of `MARLIN_FP4`."""
    deterministic: bool = False
    """Matches only if the manifest requests determinism."""
    adapts_down: bool = False
    """Matches only with `down_proj`."""
    teacher: bool = False
    """Matches only with a teacher that ranks cannot ask."""
    fp32: bool = False
    """Matches only if the manifest asks to compute in FP32."""

    def __call__(self, asked: Combination) -> bool:
        names = ("format", "family", "adapter", "experts", "engine", "trainer")
        fits = all(not getattr(self, name) or getattr(asked, name) in getattr(self, name) for name in names)
        fits = fits and not (self.on_cpu and asked.num_gpus) and not (self.deterministic and not asked.deterministic)
        fits = fits and not (self.adapts_down and not asked.adapts_down)
        fits = fits and not (self.teacher and not asked.teacher) and not (self.fp32 and not asked.fp32)
        if self.without_marlin_fp4 and (asked.capability is None or asked.capability[0] in MARLIN_FP4):
            return False
        return fits and asked.num_gpus >= (2 if self.several_gpus else 1 if self.on_gpu else 0)


COMPARED = RowCondition(
    format=FORMATS,
    family=("qwen3", "llama", "qwen3_moe", "glm4_moe", "deepseek_v3", "kimi_k2", "deepseek_v4", "gpt_oss"),
)
"""Combinations that the tests compare with transformers, family by family and format by format. A type with a shipped
record is compared in BF16, by torch alone; elsewhere the preflight of each run compares it."""
FAMILY_NAMES = COMPARED.family
UNNAMED_FIX = "name the checkpoint of another family or format in model.uri"
LIMITS: tuple[SupportRow[Combination], ...] = (
    SupportRow(
        "rollout.engine", "SGLang on a CPU",
        RowCondition(family=("gpt_oss", "deepseek_v4"), engine=("SGLang",), on_cpu=True),
        "SGLang 0.5.23 computes the attention of gpt-oss and of DeepSeek-V4 on GPUs only",
        "write rollout.engine: Torch",
    ),
    SupportRow(
        "adapter.experts", "SGLang on a GPU",
        RowCondition(
            format=("MXFP4",), family=tuple(name for name in MOE_FAMILIES if name != "deepseek_v4"),
            adapter=("LoRA",), experts=("SharedOuter", "Shared", "PerExpert"), engine=("SGLang",), on_gpu=True,
        ),
        "SGLang 0.5.23 serves no LoRA on MXFP4 experts",
        "write adapter.experts: None, or adapter.type: OFT",
    ),
    SupportRow(
        "adapter.experts", "SGLang",
        RowCondition(
            format=("MXFP4",), family=("deepseek_v4",), adapter=("LoRA",), experts=("SharedOuter", "PerExpert"),
            engine=("SGLang",), without_marlin_fp4=True,
        ),
        "LoRA on DeepSeek-V4's FP4 experts needs SGLang's Marlin kernels, which run on Hopper and on SM120 only",
        "write adapter.experts: None, or adapter.type: OFT",
    ),
    SupportRow(
        "adapter.experts", "SGLang",
        RowCondition(
            family=("gpt_oss",), adapter=("LoRA",), experts=("SharedOuter", "Shared", "PerExpert"),
            engine=("SGLang",),
        ),
        "SGLang 0.5.23 supports no LoRA on the experts of gpt-oss, whose gate and up are one tensor",
        "write adapter.experts: None, or adapter.type: OFT",
    ),
    SupportRow(
        "adapter.experts", "SGLang",
        RowCondition(adapter=("LoRA",), experts=("Shared",), engine=("SGLang",)),
        "SGLang 0.5.23 supports LoRA of routed experts shared on the outer side, or one for each",
        "write adapter.experts: SharedOuter",
    ),
    SupportRow(
        "adapter.experts", "SGLang",
        RowCondition(adapter=("OFT",), experts=("SharedOuter", "PerExpert"), engine=("SGLang",)),
        "in SGLang tokens are rotated before they are sent to their experts, so all experts share one R",
        "write adapter.experts: Shared",
    ),
    SupportRow(
        "adapter.targets", "SGLang on a GPU",
        RowCondition(adapter=("OFT",), experts=("Shared",), engine=("SGLang",), on_gpu=True, adapts_down=True),
        "SGLang computes routed experts in one kernel on a GPU: no R can be applied before their down_proj",
        "leave down_proj out of adapter.targets, or write adapter.experts: None",
    ),
    SupportRow(
        "model.computePrecision", "SGLang on a GPU",
        RowCondition(engine=("SGLang",), on_gpu=True, fp32=True),
        "SGLang's kernels of packed weights and its fast attention compute in 16 bits on a GPU",
        "write model.computePrecision: BF16 or Auto, or rollout.engine: Torch",
    ),
    SupportRow(
        "rollout.deterministic", "SGLang on a CPU",
        RowCondition(engine=("SGLang",), on_cpu=True, deterministic=True),
        "SGLang 0.5.23 samples deterministically on GPUs only",
        "remove rollout.deterministic, or write rollout.engine: Torch",
    ),
    SupportRow(
        "rollout.deterministic", "SGLang",
        RowCondition(family=("deepseek_v4",), engine=("SGLang",), deterministic=True),
        "SGLang 0.5.23 has no deterministic attention for DeepSeek-V4",
        "remove rollout.deterministic, or write rollout.engine: Torch",
    ),
    SupportRow(
        "rollout.engine", "ranks",
        RowCondition(engine=("Torch",), trainer=("Megatron",)),
        "the torch engine runs in the torch trainer's process",
        "write rollout.engine: Auto",
    ),
    SupportRow(
        "model.uri", "any engine",
        RowCondition(format=("INT4", "FP8", "NVFP4"), family=("gpt_oss",)),
        "Orbit reads the experts of gpt-oss in MXFP4, as released, and in BF16",
        "point model.uri at the released checkpoint",
    ),
    SupportRow(
        "model.uri", "any engine",
        RowCondition(format=("INT4", "NVFP4"), family=("deepseek_v4",)),
        "Orbit reads DeepSeek-V4 in FP4 and FP8, as released, and in BF16",
        "point model.uri at the released checkpoint",
    ),
    SupportRow(
        "adapter.experts", "attached servers",
        RowCondition(experts=("SharedOuter", "Shared", "PerExpert"), engine=("OpenAI",)),
        "adapters of routed experts are not sent to attached servers in this version",
        "write adapter.experts: None",
    ),
    SupportRow(
        "training.trainer", "ranks",
        RowCondition(family=("deepseek_v4",), trainer=("Megatron",)),
        "this version does not divide the attention of DeepSeek-V4 among GPUs: it keeps a state of its own",
        "write training.trainer: Torch where one GPU is enough",
        state="missing",
    ),
    SupportRow(
        "training.trainer", "ranks",
        RowCondition(trainer=("Megatron",), teacher=True),
        "ranks hold neither a second adapter nor another distribution: their teacher is the base by sampled "
        "tokens, or a served model",
        "write training.trainer: Torch where one GPU is enough, or algorithm.teacher: {type: Base, over: Sampled}",
        state="missing",
    ),
    SupportRow(
        "", "ranks on a GPU",
        RowCondition(trainer=("Megatron",), on_gpu=True),
        "ranks that hold a model in parts have run on CPUs, not on hardware",
        state="planned",
    ),
    SupportRow(
        "", "SGLang",
        RowCondition(family=("deepseek_v4",), engine=("SGLang",)),
        "DeepSeek-V4's attention is adapted by Orbit's plug-in: tested module by module on a CPU, not run on hardware",
        state="planned",
    ),
    SupportRow(
        "", "SGLang",
        RowCondition(
            format=("MXFP4",), family=("deepseek_v4",), adapter=("LoRA",), experts=("SharedOuter", "PerExpert"),
            engine=("SGLang",),
        ),
        "LoRA on DeepSeek-V4's FP4 experts is Orbit's plug-in over SGLang's Marlin kernels (Hopper, SM120), not run on "
        "hardware",
        state="planned",
    ),
    SupportRow(
        "", "attached servers",
        RowCondition(family=MOE_FAMILIES, engine=("OpenAI",)),
        "Orbit has attached dense models only",
        state="planned",
    ),
    SupportRow(
        "", "SGLang on a GPU",
        RowCondition(engine=("SGLang",), on_gpu=True),
        "SGLang on a GPU is written and not run on hardware",
        state="planned",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Support:
    state: State
    reasons: tuple[str, ...] = ()
    fix: str = ""
    where: str = ""
    """A field under `spec`."""


def find_support(asked: Combination) -> Support:
    """The worst state of all rows that match, and the reasons for it; `missing` if no row matches.

    Args:
        asked: a family or format left empty is unknown: only rows for every one are asked.
    """
    found = [row for row in LIMITS if row.when(asked)]
    known, alone = shipped_record({"model_type": asked.family}) is not None, asked.engine == asked.trainer == "Torch"
    is_built = known and alone and asked.format == "BF16"
    if asked.family and asked.format and not COMPARED(asked) and not is_built:
        message = f"no test compares {asked.family} in {asked.format} with another implementation"
        unnamed: SupportRow[Combination] = SupportRow(
            "model.uri",
            "Orbit",
            COMPARED,
            message,
            UNNAMED_FIX,
            state="planned" if known and asked.trainer == "Torch" else "missing",
        )
        found.append(unnamed)
    for state in ("refused", "missing", "planned"):
        if of_state := [row for row in found if row.state == state]:
            return Support(of_state[0].state, tuple(row.why for row in of_state), of_state[0].fix, of_state[0].what)
    return Support("works")


def check_combination(asked: Combination) -> None:
    """Raises UnsupportedError (78) if it is refused."""
    check_rows([row for row in LIMITS if row.state == "refused"], asked)
