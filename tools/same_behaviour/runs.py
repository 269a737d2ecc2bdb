"""Whole runs on this processor: every step's adapter, every number that is not a time, every file and line.

Belongs here: which runs, and what is recorded of each. Does not belong here: what says the same on any processor
(`texts`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tools.same_behaviour.product import Ended, Product

TIMES = re.compile(r"seconds_|tokens_per_second")
COUNTS = re.compile(r"step|policy_version|reward|groups|turns|tool|tokens$|response|truncated")
"""Numbers that do not follow from rounding."""
OTHERS = "[transformers]"
"""How lines begin that another library writes."""
EARLIER = "tests/data/earlier_run"
"""A run folder that an earlier commit wrote."""
SMALL = {
    "training.steps": 3, "training.promptsPerStep": 8, "observability.metricsPort": -1, "checkpoint.everySteps": 2,
}  # fmt: skip
ADDER = "examples/quickstart.yaml"
BARE = {"evaluation": None}
CHANCE = """
import zlib

def score(completion, prompt, fields):
    return zlib.crc32(f"{prompt} {completion}".encode()) % 64 / 64
"""


@dataclass(frozen=True)
class Run:
    """One run of an example, made smaller."""

    example: str = ADDER
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of `spec`, by path; None removes."""
    command: str = "run"
    unlike: tuple[str, ...] = ()
    """Names of numbers that differ from one time to the next, for a reason that stands beside the run."""
    has_same_bits: bool = True
    """Whether two runs give the same bits; else only numbers are recorded that do not follow from rounding."""
    tells: bool = True
    """Whether its lines come in the same order each time, however busy the machine is."""


def _family(uri: str, precision: str) -> Run:
    """Of a model that knows nothing: its answers are rewarded by chance, so that there is something to learn."""
    rewards = [{"name": "chance", "entrypoint": "chance:score"}]
    return Run(
        changes={
            "model.uri": f"builtin://{uri}", "model.precision": precision, "training.steps": 2, "adapter.targets": None,
            "environment.rewards": rewards, **BARE,
        }
    )  # fmt: skip


IN_ONE_PROCESS = {
    "quickstart": Run(changes={"evaluation.everySteps": 2, "evaluation.samples": 1}),
    "quickstart-oft": Run("examples/quickstart-oft.yaml", {"evaluation": None}),
    **{
        f"precision {precision}": Run(changes={"model.precision": precision, "training.steps": 2, **BARE})
        for precision in ("BF16", "FP8", "INT4", "MXFP4", "NVFP4")
    },
    "activations FP8": Run(
        changes={"model.precision": "FP8", "model.activationPrecision": "FP8", "training.steps": 2, **BARE}
    ),
    "family moe": _family("tiny-moe-adder", "INT4"),
    "family kimi-k2": _family("tiny-kimi-k2", "INT4"),
    "family gpt-oss": _family("tiny-gpt-oss", "MXFP4"),
    "family deepseek-v4": _family("tiny-deepseek-v4", "MXFP4"),
    "family glm4-moe": _family("tiny-glm4-moe", "FP8"),
    "family qwen3-moe": _family("tiny-qwen3-moe", "NVFP4"),
    "sft": Run("examples/sft.yaml", {"data.validation.everySteps": 2, "data.limit": 800}),
    "ppo": Run("examples/ppo.yaml", {"training.promptsPerStep": 32}),
    "whole model": Run("examples/sft.yaml", {"adapter": {"type": "Full"}, "model.precision": "BF16"}),
    "distillation": Run("examples/distillation.yaml", {"algorithm.teacher.uri": "TEACHER"}),
    # With several turns the load decides which requests share a batch, and how their sums are rounded.
    "calculator": Run(
        "examples/calculator.yaml", {"training.steps": 2, "training.promptsPerStep": 4}, has_same_bits=False
    ),
    "code": Run("examples/code.yaml", {"training.steps": 2, "training.promptsPerStep": 4}),
    "dropout, two epochs, KL": Run(
        changes={
            "adapter.lora.dropout": 0.1,
            "parity": {"preflight": "Report"},
            "training.updateEpochs": 2,
            "training.miniBatchPrompts": 4,
            "algorithm.kl": {"coefficient": 0.1},
            **BARE,
        }
    ),
    # Which version samples a token depends on the machine's load. At this rate no version's logits differ, so that the
    # tokens and all that follows from them are the same; how stale they were is not.
    "asynchronous": Run(
        changes={"rollout.maxStaleness": 1, "training.learningRate": 1e-30, **BARE},
        unlike=("staleness_mean", "staleness_max", "rollouts_waiting", "rollouts_unfinished", "dropped_fraction"),
        tells=False,
    ),
}
TEACHER = "quickstart"
RANKS = {
    # Learning from demonstrations, which needs no engine: with a trainer of ranks samples only a server.
    "ranks, TP2": Run(
        "examples/sft.yaml", {"training.trainer": "Megatron", "training.parallel": {"tensor": 2}, "data.limit": 800}
    ),
    "ranks, TP2, EP2, OFT": Run(
        "examples/ranks.yaml",
        {
            "algorithm": {"type": "SFT"},
            "data.prompts": [{"uri": "builtin://two-digit-addition", "completionField": "answer"}],
            "rollout.engine": None,
            "training.steps": 2,
            "data.limit": 800,
        },
    ),
}
PROCESSES = {
    "three processes": Run(changes=BARE, command="rl", tells=False),
    "three processes, asynchronous": Run(
        changes={"rollout.maxStaleness": 1, "training.learningRate": 1e-30, **BARE},
        command="rl",
        unlike=IN_ONE_PROCESS["asynchronous"].unlike,
        tells=False,
    ),
}
KILLED = Run(changes={"training.steps": 5, "checkpoint.everySteps": 1, **BARE})
KILLED_AFTER = 2


def write_manifest(product: Product, name: str, run: Run) -> Path:
    """The example with the run's changes, beside the examples' own files. Returns its path."""
    manifest = yaml.safe_load((product.root / run.example).read_text(encoding="utf-8"))
    for path, value in {**SMALL, **run.changes}.items():
        *blocks, last = path.split(".")
        block = manifest["spec"]
        for each in blocks:
            block = block.setdefault(each, {})
        if value == "TEACHER":
            value = str(product.scratch / TEACHER / "adapters" / f"policy-v{SMALL['training.steps']}")
        if value is None:
            block.pop(last, None)
        else:
            block[last] = value
    (product.scratch / "chance.py").write_text(CHANCE)
    file = product.scratch / f"{name}.yaml"
    file.write_text(yaml.safe_dump(manifest), encoding="utf-8")
    return file


def start(product: Product, name: str, run: Run) -> int:
    file = write_manifest(product, name, run)
    argv = [run.command, str(file), "--out", str(product.scratch / name)]
    return product.start(argv, kind="heavy", folder=product.scratch, name=name)


def carried_out(product: Product, name: str, run: Run) -> Iterator[str]:
    pid = start(product, name, run)
    ended = product.wait(pid, kind="heavy", name=name)
    yield f"{name}: exit {ended.code}"
    yield from recorded(product.scratch / name, ended, run)


def recorded(folder: Path, ended: Ended, run: Run) -> Iterator[str]:
    said = (*ended.out.splitlines(), *ended.error.splitlines())
    lines = [f"  {line}".rstrip() for line in said if not line.startswith(OTHERS)]
    yield from lines if run.tells else sorted(line for line in lines if not line.startswith("  waiting for "))
    yield from rows(folder, run)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    yield f"  files: {' '.join(names)}"
    for name in names:
        if name.endswith(".safetensors") and run.has_same_bits:
            yield f"  {hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16]} {name}"


def rows(folder: Path, run: Run) -> Iterator[str]:
    """Each step's numbers, without times and without what is not measured."""
    file = folder / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.is_file() else ():
        row = {name: value for name, value in json.loads(line).items() if value is not None and not TIMES.match(name)}
        told = (name for name in row if name not in run.unlike and (run.has_same_bits or COUNTS.match(name)))
        yield f"  {json.dumps({name: row[name] for name in told})}"


def in_one_process(product: Product) -> Iterator[str]:
    """Runs of one process: algorithms, precisions, families."""
    for name, run in IN_ONE_PROCESS.items():
        yield from carried_out(product, name, run)


def ranks(product: Product) -> Iterator[str]:
    """Runs whose trainer is divided among processes."""
    for name, run in RANKS.items():
        yield from carried_out(product, name, run)


def processes(product: Product) -> Iterator[str]:
    """Runs of three processes."""
    for name, run in PROCESSES.items():
        yield from carried_out(product, name, run)


def resumed(product: Product) -> Iterator[str]:
    """A run that is killed and goes on, and the replay of what it recorded."""
    name = "killed"
    pid = start(product, name, KILLED)
    durable = product.scratch / name / "checkpoints" / f"step-{KILLED_AFTER:06d}" / "manifest.json"
    while not durable.exists() and product.poll(pid, kind="heavy") is None:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    ended = product.wait(pid, kind="heavy", name=name)
    yield f"{name}: exit {ended.code}"
    ended = product.wait(start(product, name, KILLED), kind="heavy", name=name)
    yield f"{name}, started again: exit {ended.code}"
    yield from rows(product.scratch / name, KILLED)
    report = json.loads((product.scratch / name / "report.json").read_text())
    yield f"  executions {report['executions']} resumed {report['resumed']} adapter {report['adapter_digest']}"
    replayed = product.orbit("replay", str(product.scratch / name), kind="heavy", folder=product.scratch)
    yield f"orbit replay of it: exit {replayed.code}"
    yield from (f"  {line}".rstrip() for line in (*replayed.out.splitlines(), *replayed.error.splitlines()))


def earlier(product: Product) -> Iterator[str]:
    """A run that an earlier commit began, and where it arrives. It summed the norms of gradients in fp32."""
    folder = product.scratch / "earlier"
    shutil.copytree(Path(__file__).parents[2] / EARLIER, folder)
    ended = product.orbit("run", str(folder / "run.yaml"), "--out", str(folder / "run"), kind="heavy", folder=folder)
    yield f"orbit run of a folder that holds three of six steps: exit {ended.code}"
    yield from rows(folder / "run", Run(unlike=("grad_norm",)))
    report = json.loads((folder / "run" / "report.json").read_text())
    yield f"  adapter {report['adapter_digest']} base {report['base_digest_after']}"
