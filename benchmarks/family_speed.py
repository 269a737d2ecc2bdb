"""A training pass over 60 sequences of mixed length, forward and backward, of every kind of family against a llama.

The llama has the same widths and number of layers, and its sequences are packed. Both have the tiny sizes of the table
test's checkpoints, where a pass is mostly the overhead of many small operations; `--width 4` is four times as wide.
Times are processor time of one thread.

Belongs here: the time of a pass, and how each family's passes run. Does not belong here: whether they are right
(`tests/models/test_causal_types.py`).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Comparison, Measured, compare, pass_seconds, run, table
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.attention import layers_of
from orbit_runtime.policy.packed import Branch
from tests.integration.tiny_models import SIZES
from tests.models.causal_types import TYPES, make_type
from tests.models.family_matrix import tokens_of

MEASURES = ("orbit_runtime/policy", "orbit_runtime/quant", "orbit_runtime/adapters")
FAMILIES = (
    "qwen2", "qwen2_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe", "mixtral",
    "olmoe", "gemma2", "gemma3_text", "gemma4_text", "phi3", "glm4", "glm_moe_dsa", "lfm2", "granitemoehybrid",
    "falcon_h1", "nemotron_h", "deepseek_v2", "mistral", "gpt2", "opt",
)  # fmt: skip
WIDTHS = ("hidden_size", "intermediate_size", "head_dim", "lora_rank", "d_head", "d_ssm", "ffn_dim", "proj_dim")
"""Last parts of the names of settings that grow with the width."""
SEQUENCES, TARGET = 60, 1 / 3


def load(scratch: Path, name: str, width: int, **changed: int) -> tuple[Policy, Path]:
    settings = SIZES | TYPES.get(name, {})
    wide = {key: value * width for key, value in settings.items() if key.endswith(WIDTHS)}
    folder = make_type(scratch / f"{name}{changed}", name, **wide, **changed)
    return load_policy(folder, AdapterConfig("LoRA", (), rank=2, alpha=4.0), longest=256), folder


def train(policy: Policy, branches: list[Branch]) -> None:
    with policy.injected.selection.use(TRAINER_SLOT):
        logprobs_R, _ = policy.logprobs(policy.pack(branches))
        logprobs_R.sum().backward()


def measure(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(1)
    draw = random.Random(0)
    branches = [
        Branch(index, tokens_of(5 + draw.randrange(20), index), tokens_of(5 + draw.randrange(200), 100 + index))
        for index in range(2 if options.smallest else SEQUENCES)
    ]
    answers = sum(len(branch.continuation_T) for branch in branches)
    tokens = answers + sum(len(branch.prefix_T) for branch in branches)
    rows: list[Comparison] = []
    llamas: dict[int, tuple[Policy, Path]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in FAMILIES[-2:] if options.smallest else options.families:
            policy, folder = load(Path(scratch), name, options.width)
            layers = len(layers_of(policy.model))
            if layers not in llamas:
                llamas[layers] = load(Path(scratch), "llama", options.width, num_hidden_layers=layers)
            llama = (f"llama of {layers} layers", partial(train, llamas[layers][0], branches))
            least = tuple(2 * pass_seconds(each, tokens, answers) for each in (folder, llamas[layers][1]))
            family = (name, partial(train, policy, branches))
            mode = f"{name}, {policy.mode.rows}, {policy.mode.decode}"
            times = options.repetitions
            row = compare(mode, family, llama, repetitions=times, target=TARGET, clock=time.process_time)
            rows.append(replace(row, least=(least[0], least[1])))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))
    facts = {"sequences": len(branches), "width": options.width, "ratio": "the llama's time / the family's"}
    return Measured(rows, facts=facts, variant="" if options.width == 1 else f"width_{options.width}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--width", type=int, default=1, help="factor of all widths")


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure, add_options, repetitions=5))
