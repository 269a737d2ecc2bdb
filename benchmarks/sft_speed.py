"""Supervised fine-tuning: Orbit's run against TRL's SFTTrainer with PEFT LoRA, on the same demonstrations.

Belongs here: both sides on widely varying lengths, taking turns in one process. Does not belong here: what a step does
(`orbit_runtime.loop.sft`).

There are 128 demonstrations: four of five answers have 8 to 40 tokens, one of five 100 to 400. Both sides train a LoRA
of rank 16 on the BF16 base, 32 demonstrations an update, loss on answers alone, no checkpoints in between. TRL runs in
several variants, padded to the longest of a batch: in fp32 with whole batches or cut in four, rows sorted by length or
not; on the pretrained model sorted, in fp32 or BF16. The fastest counts. Its own packing needs flash attention to keep
rows apart. Tokens are those of the demonstrations, without padding; seconds are those of the steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
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
from benchmarks.trl_clock import build_clock
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.observability.progress import SilentProgress
from orbit_runtime.spec import OrbitRun

MEASURES = (
    "orbit_runtime/loop/sft.py", "orbit_runtime/data", "orbit_runtime/training", "orbit_runtime/policy",
    "orbit_runtime/adapters", "orbit_runtime/quant", "orbit_runtime/algorithms",
)  # fmt: skip
BATCH, WARMUP_STEPS = 32, 2
TARGET = 4.0
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VARIANTS = {
    "whole batches": (1, False, "float32"),
    "cut in four": (4, False, "float32"),
    "cut in four, sorted": (4, True, "float32"),
}
"""TRL: number of parts of a batch, whether rows are sorted by length, and the dtype of base and passes."""
REAL_VARIANTS = {f"cut in four, sorted, {dtype}": (4, True, dtype) for dtype in ("float32", "bfloat16")}


def write_rows(path: Path, count: int) -> list[dict[str, str]]:
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        length = draw.randint(100, 400) if draw.random() < 0.2 else draw.randint(8, 40)
        answer = "".join(draw.choice("0123456789") for _ in range(length))
        rows.append({"prompt": f"{draw.randint(10, 99)}+{draw.randint(10, 99)}=", "completion": answer})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def orbit_turn(path: Path, folder: Path, out: Path) -> Callable[[int], float]:
    """Returns a function that continues one run for a number of steps and returns the median seconds of one."""
    from orbit_runtime.loop import run as train

    steps = 0

    def turn(count: int) -> float:
        nonlocal steps
        first, steps = steps + WARMUP_STEPS, steps + WARMUP_STEPS + count
        asked = OrbitRun.model_validate({
            "apiVersion": "orbitrl.dev/v1alpha1",
            "kind": "OrbitRun",
            "metadata": {"name": "benchmark"},
            "spec": {
                "model": {"uri": str(folder), "precision": "BF16"},
                "adapter": {"targets": TARGETS},
                "algorithm": {"type": "SFT"},
                "data": {"prompts": [{"uri": str(path), "completionField": "completion"}]},
                "training": {"steps": steps, "promptsPerStep": BATCH, "learningRate": 1e-4},
                "checkpoint": {"everySteps": 1000},
                "observability": {"metricsPort": -1},
            },
        })  # fmt: skip
        train(asked, out=str(out), progress=SilentProgress())
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return statistics.median(row["seconds_train"] for row in rows if row["step"] > first)

    return turn


def trl_turn(
    rows: list[dict[str, str]], folder: Path, out: Path, variant: tuple[int, bool, str]
) -> Callable[[int], float]:
    """Returns a function that trains a number of steps with an SFTTrainer and returns the median seconds of one."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    cuts, is_sorted, dtype = variant
    told = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
        }
        for row in rows
    ]
    config: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": BATCH // cuts,
        "gradient_accumulation_steps": cuts,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "max_length": 2048,
        "completion_only_loss": True,
        "gradient_checkpointing": False,
        "bf16": dtype == "bfloat16",
        "use_cpu": not torch.cuda.is_available(),
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
        **({"train_sampling_strategy": "group_by_length"} if is_sorted else {}),
    }

    def turn(count: int) -> float:
        clock = build_clock()
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"),
            processing_class=AutoTokenizer.from_pretrained(folder),
            args=SFTConfig(**config, max_steps=WARMUP_STEPS + count),
            train_dataset=Dataset.from_list(told),
            peft_config=LoraConfig(
                r=16, lora_alpha=32, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM"
            ),
            callbacks=[clock],
        )
        trainer.train()
        return statistics.median(clock.seconds()[WARMUP_STEPS:])

    return turn


def measure(options: argparse.Namespace) -> Measured:
    need_packages("trl", "peft", "datasets", install="`make dev` does so")
    turns, steps, count = (1, 1, 64) if options.smallest else (max(3, options.repetitions // 5), 8, 128)
    is_real = options.model == "real"
    folder = real_model() if is_real else builtin_folder("tiny-adder", "BF16")
    variants = REAL_VARIANTS if is_real else VARIANTS
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        rows = write_rows(scratch / "rows.jsonl", count)
        # A digit is a token, and the end of an answer one.
        answers = statistics.mean(len(row["completion"]) + 1 for row in rows) * BATCH
        tokens = answers + BATCH * len(ChatTokenizer(folder).encode_chat([{"role": "user", "content": "23+45="}]))
        orbit = orbit_turn(scratch / "rows.jsonl", folder, scratch / "orbit")
        sides = {name: trl_turn(rows, folder, scratch / name, variant) for name, variant in variants.items()}
        ours: list[float] = []
        theirs: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(turns):
            ours.append(orbit(steps))
            for name, side in sides.items():
                theirs[name].append(side(steps))
    fastest = min(theirs, key=lambda name: statistics.median(theirs[name]))
    ratio = statistics.median(b / a for a, b in zip(ours, theirs[fastest], strict=True))
    medians = statistics.median(ours), statistics.median(theirs[fastest])
    least = 2 * pass_seconds(folder, tokens, answers)
    name, target = f"SFT step, {BATCH} rows of mixed length", 3.0 if is_real else TARGET
    row = Comparison(name, "Orbit", f"TRL, {fastest}", *medians, ratio, target, turns, (least, least))
    figures = {
        "tokens_per_second_orbit": tokens / medians[0],
        **{f"tokens_per_second_trl, {name}": tokens / statistics.median(found) for name, found in theirs.items()},
    }
    print(table([row]))
    for name, value in figures.items():
        print(f"{name}: {value:,.0f}")
    return Measured([row], figures, variant="real" if is_real else "")


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure, add_model_option))
