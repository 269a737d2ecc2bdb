"""A whole RL step: Orbit's loop, publish, proof and checkpoint included, against TRL's GRPOTrainer with PEFT LoRA.

Belongs here: both sides at the two shapes of the speed table, or on a pretrained model, taking turns in one process.
Does not belong here: what a step does (`orbit_runtime.loop`).

TRL runs at its best: one process, the fastest division of the batch, no gradient checkpointing, no reference model
(beta 0), no second pass for old log-probs (one update a generation), logging and saving off; tiny models in fp32 as on
Orbit's side, the pretrained one in fp32 and in BF16, of which the faster counts.
Orbit writes a checkpoint at every step and proves every publish; its step time (`seconds_total`) includes all of that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (
    Comparison,
    Measured,
    add_model_option,
    need_packages,
    pass_seconds,
    real_model,
    run,
    table,
)
from benchmarks.long_tail import LEARNING_RATE, MAX_NEW_TOKENS, build_model_folder, even_length
from benchmarks.trl_clock import build_clock
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.observability.progress import Progress, SilentProgress
from orbit_runtime.spec import OrbitRun

MEASURES = (
    "orbit_runtime/loop", "orbit_runtime/training", "orbit_runtime/rollout", "orbit_runtime/policy",
    "orbit_runtime/adapters", "orbit_runtime/quant", "orbit_runtime/algorithms", "orbit_runtime/parity",
)  # fmt: skip
GROUP = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WARMUP_STEPS = 2
"""Steps at the start of every turn that are not counted."""


@dataclass(frozen=True)
class Shape:
    """One row of the speed table."""

    name: str
    prompts: int
    max_new_tokens: int
    learning_rate: float
    precision: str
    steps_per_turn: int
    target: float
    reward: str
    """`exact`: the sum is correct; `even`: the answer's length is even."""
    trl_micro_batches: int
    """Parts of TRL's batch in training: the fastest of 1, 2 and 4. Smaller activations stay in the CPU's caches."""
    group: int = GROUP
    trl_precisions: tuple[str, ...] = ("float32",)
    """torch's names of the dtypes of TRL's base and passes."""


SHORT = Shape("RL step, 32 x 16 x 4 tokens", 32, 4, 2e-3, "INT4", 8, 1.5, "exact", 1)
LONG = Shape("RL step, 16 x 16, long-tailed up to 128", 16, MAX_NEW_TOKENS, LEARNING_RATE, "BF16", 2, 3.0, "even", 2)
REAL = Shape(
    "RL step, 135 M, 8 x 8, up to 48 tokens", 8, 48, LEARNING_RATE, "BF16", 1, 4.0, "even", 2, 8,
    ("float32", "bfloat16"),
)  # fmt: skip


@dataclass
class Turns:
    """Measurements of one side."""

    seconds: list[float] = field(default_factory=list)
    """Median of the counted steps, one per turn."""
    tokens: list[float] = field(default_factory=list)
    """Mean length of a completion, one per counted step or call."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Orbit's own numbers of the last turn's counted steps."""


LORA: Mapping[str, Any] = {"type": "LoRA", "lora": {"rank": 16, "alpha": 32.0}}
NOTHING: Mapping[str, Any] = MappingProxyType({})


def manifest(
    shape: Shape, folder: Path, *, steps: int, adapter: Mapping[str, Any] = LORA, training: Mapping[str, Any] = NOTHING
) -> OrbitRun:
    """
    Args:
        adapter: `spec.adapter` without its targets.
        training: fields of `spec.training` besides the shape's.
    """
    exact = {"name": "correct", "type": "ExactMatch", "arguments": {"field": "answer"}}
    even = {"name": "even", "entrypoint": f"{even_length.__module__}:{even_length.__name__}"}
    return OrbitRun.model_validate({
        "apiVersion": "orbitrl.dev/v1alpha1",
        "kind": "OrbitRun",
        "metadata": {"name": "benchmark"},
        "spec": {
            "model": {"uri": str(folder), "precision": shape.precision, "maxSequenceLength": 512},
            "adapter": {**adapter, "targets": TARGETS},
            "algorithm": {"type": "GRPO", "groupSize": shape.group},
            "data": {"prompts": [{"uri": "builtin://two-digit-addition"}]},
            "environment": {"type": "SingleTurn", "rewards": [exact if shape.reward == "exact" else even]},
            "rollout": {"sampling": {"maxNewTokens": shape.max_new_tokens}},
            "training": {
                "steps": steps, "promptsPerStep": shape.prompts, "learningRate": shape.learning_rate, **training,
            },
            "observability": {"metricsPort": -1},
        },
    })  # fmt: skip


def orbit_turn(
    shape: Shape,
    folder: Path,
    out: Path,
    *,
    adapter: Mapping[str, Any] = LORA,
    training: Mapping[str, Any] = NOTHING,
    progress: Progress | None = None,
) -> Callable[[Turns], None]:
    """Returns a function that continues one run for a turn's steps, each timed by the run itself."""
    from orbit_runtime.loop import run as train

    steps = 0

    def turn(turns: Turns) -> None:
        nonlocal steps
        first = steps + WARMUP_STEPS
        steps += WARMUP_STEPS + shape.steps_per_turn
        asked = manifest(shape, folder, steps=steps, adapter=adapter, training=training)
        root = Path(__file__).resolve().parent.parent
        train(asked, out=str(out), progress=progress or SilentProgress(), manifest_folder=root)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        turns.rows = [row for row in rows if row["step"] > first]
        assert len(turns.rows) == shape.steps_per_turn
        turns.seconds.append(statistics.median(row["seconds_total"] for row in turns.rows))
        turns.tokens += [row["response_tokens_mean"] for row in turns.rows]

    return turn


def trl_turn(shape: Shape, folder: Path, out: Path, precision: str = "float32") -> Callable[[Turns], None]:
    """Returns a function that trains a turn's steps with one GRPOTrainer, each timed from one step's end to the next.

    `precision`: torch's name for the dtype of base and passes.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    lengths: list[float] = []

    def reward(completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        lengths.append(statistics.mean(len(ids) for ids in completion_ids))
        texts = [completion[0]["content"] for completion in completions]
        if shape.reward == "exact":
            return [float(text.strip() == right) for text, right in zip(texts, answer, strict=True)]
        return [even_length(text, None, None) for text in texts]

    rows = [
        {"prompt": [{"role": "user", "content": f"{left}+{right}="}], "answer": str(left + right)}
        for left in range(10, 100)
        for right in range(10, 100)
    ]
    batch = shape.prompts * shape.group
    config = GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=batch // shape.trl_micro_batches,
        gradient_accumulation_steps=shape.trl_micro_batches,
        steps_per_generation=shape.trl_micro_batches,
        num_generations=shape.group,
        max_completion_length=shape.max_new_tokens,
        max_steps=WARMUP_STEPS + shape.steps_per_turn,
        learning_rate=shape.learning_rate,
        lr_scheduler_type="constant",
        num_iterations=1,
        beta=0.0,
        temperature=1.0,
        top_k=0,
        gradient_checkpointing=False,
        bf16=precision == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        disable_dropout=True,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    clock = build_clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision), attn_implementation="sdpa"),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM"),
        callbacks=[clock],
    )

    def turn(turns: Turns) -> None:
        lengths.clear()
        trainer.train()
        turns.seconds.append(statistics.median(clock.seconds()[WARMUP_STEPS:]))
        turns.tokens += lengths[WARMUP_STEPS:]

    return turn


def least_seconds(shape: Shape, folder: Path, tokens: float) -> float:
    """Seconds of a step's useful work: each prompt once, all answers sampled together and trained on together.

    Args:
        tokens: mean length of an answer.
    """
    prompt = len(ChatTokenizer(folder).encode_chat([{"role": "user", "content": "23+45="}])) * shape.prompts
    answers = shape.prompts * shape.group
    sampling = pass_seconds(folder, prompt, shape.prompts) + tokens * pass_seconds(folder, answers, answers)
    return sampling + 2 * pass_seconds(folder, prompt + answers * tokens, answers * tokens)


def compare_shape(shape: Shape, folders: tuple[Path, Path], scratch: Path, turns: int) -> tuple[Comparison, Any]:
    """`folders`: Orbit's checkpoint, and one with the same values in BF16 for TRL."""
    orbit, trls = Turns(), {precision: Turns() for precision in shape.trl_precisions}
    sides = [(orbit_turn(shape, folders[0], scratch / "orbit"), orbit)]
    sides += [(trl_turn(shape, folders[1], scratch / each, each), measured) for each, measured in trls.items()]
    for number in range(turns):
        for turn, measured in sides if number % 2 else reversed(sides):
            turn(measured)
    precision, trl = min(trls.items(), key=lambda each: statistics.median(each[1].seconds))
    ratio = statistics.median(theirs / ours for ours, theirs in zip(orbit.seconds, trl.seconds, strict=True))
    medians = statistics.median(orbit.seconds), statistics.median(trl.seconds)
    means = statistics.mean(orbit.tokens), statistics.mean(trl.tokens)
    least = least_seconds(shape, folders[0], means[0]), least_seconds(shape, folders[0], means[1])
    other = "TRL + PEFT" if len(trls) == 1 else f"TRL + PEFT, {precision}"
    row = Comparison(shape.name, "Orbit", other, *medians, ratio, shape.target, turns, least)
    facts = {
        "mean_tokens_orbit": means[0],
        "mean_tokens_trl": means[1],
        "seconds_orbit": orbit.seconds,
        **{f"seconds_trl{'' if len(trls) == 1 else f'_{each}'}": found.seconds for each, found in trls.items()},
    }
    return row, facts


def measure(options: argparse.Namespace) -> Measured:
    need_packages("trl", "peft", "datasets", install="`make dev` does so")
    comparisons, figures = [], {}
    shapes: Sequence[Shape] = (SHORT, LONG)
    turns = max(3, options.repetitions // 3)
    if options.model == "real":
        folder, shapes = real_model(), (REAL,)
        if options.smallest:
            shapes, turns = (replace(REAL, name="RL step, 1 x 2, up to 4", prompts=1, group=2, max_new_tokens=4),), 1
    elif options.smallest:
        short = replace(SHORT, name="RL step, 2 x 16 x 4 tokens", prompts=2, steps_per_turn=1)
        long = replace(LONG, name="RL step, 2 x 16, up to 8", prompts=2, max_new_tokens=8, steps_per_turn=1)
        shapes, turns = (short, long), 1
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        long_tail = build_model_folder(scratch / "long-tail")
        adder = (builtin_folder("tiny-adder", "INT4"), builtin_folder("tiny-adder", "BF16"))
        models = ((folder, folder),) if options.model == "real" else (adder, (long_tail, long_tail))
        for index, (shape, folders) in enumerate(zip(shapes, models, strict=True)):
            row, figures[shape.name] = compare_shape(shape, folders, scratch / str(index), turns)
            comparisons.append(row)
    print(table(comparisons))
    for name, values in figures.items():
        print(f"{name}: mean completion {values['mean_tokens_orbit']:.1f} / {values['mean_tokens_trl']:.1f} tokens")
    return Measured(comparisons, figures, variant="real" if options.model == "real" else "")


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure, add_model_option))
