"""A run folder as a run leaves it, made up: for everything that reads one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from orbit_runtime.observability.metrics import MetricsRow, build_row, part_field

BASE = "tree:" + "b" * 64


def synthetic_row(step: int, *, start: float = 0.28, gain: float = 0.5, total: int = 60, seed: int = 1) -> MetricsRow:
    """A step of a run that learns, with a wobble that depends on step and seed only."""
    wobble = math.sin(step * 12.9898 + seed * 78.233)
    share = 1 - math.exp(-3 * step / total)
    reward = start + gain * share + 0.02 * wobble
    return build_row(
        step=step,
        policy_version=step,
        adapter_digest=f"tree:{step:064x}",
        reward_mean=reward,
        reward_std=math.sqrt(max(0.0, reward * (1 - reward))),
        reward_value=500,
        reward_wrong=10,
        reward_timeout=2,
        reward_crash=0,
        loss=-0.01 * share + 0.002 * wobble,
        kl=0.08 * share,
        kl_base=0.07 * share,
        entropy=1.4 - 1.1 * share,
        grad_norm=0.4 + 0.1 * wobble,
        clip_fraction=0.01,
        learning_rate=2e-3,
        response_tokens_mean=3.6 - 0.4 * share,
        truncated_fraction=0.3 * (1 - share),
        tokens=1843,
        tokens_per_second=9000 + 800 * wobble,
        parity_mean=2e-7 * (1.2 + wobble),
        parity_p99=9e-7,
        parity_max=2e-6 * (1.5 + wobble),
        parity_k3=1e-13,
        parity_outside=0.0,
        parity_top1=1.0,
        parity_tokens=1843,
        parity_limit=1e-5,
        staleness_mean=0.0,
        staleness_max=0,
        rollouts_waiting=0,
        rollouts_unfinished=0,
        prompts_cancelled=0,
        tokens_cancelled=0,
        tokens_unchosen=0,
        seconds_collect=0.11 + 0.01 * wobble,
        seconds_score=0.01,
        seconds_train=0.07,
        seconds_publish=0.02,
        seconds_checkpoint=0.006,
        seconds_total=0.22 + 0.01 * wobble,
    )


def synthetic_group(step: int, prompt: int, pretend: SyntheticRun) -> list[dict[str, Any]]:
    """The answers to one prompt: those of an even number are right from step 31 on."""
    rewards = [float(step > 30 and sample % 2 == 0) for sample in range(pretend.group_size)]
    mean = sum(rewards) / len(rewards)
    return [
        {
            "run": "synthetic",
            "step": step,
            "prompt_id": f"addition/{prompt}",
            "sample_index": sample,
            "turns": [
                {"role": "user", "start": 0, "end": 6, "text": f"{10 + prompt}+11="},
                {"role": "assistant", "start": 6, "end": 9,
                 "text": pretend.completion or str(21 + prompt if reward else 13 + prompt)},
            ],
            "token_ids_T": [1] * 9,
            "loss_mask_T": [0] * 6 + [1] * 3,
            "logprobs_T": [0.0] * 6 + [-0.1] * 3,
            "versions_T": [-1] * 6 + [step] * 3,
            "reward": reward,
            "outcome": "value",
            "reward_parts": {name: reward if number == 0 else 0.5 for number, name in enumerate(pretend.parts)},
            "finish_reason": "stop",
            "routed_experts": None,
            "advantage": reward - mean,
            **({"tokens": [["2", -0.01, reward - mean, step - 1, 0.12], ["1", -2.3, reward - mean, step, 0.6]]}
               if (prompt, sample) == (3, 0) else {}),
        }
        for sample, reward in enumerate(rewards)
    ]  # fmt: skip


@dataclass(frozen=True)
class SyntheticRun:
    """What the folder pretends. With `ended=None` it still beats its heart or was killed, by the clock."""

    name: str = "synthetic"
    steps: int = 60
    ended: str | None = "done"
    heartbeat_at: float = 1000.0
    start: float = 0.28
    gain: float = 0.5
    seed: int = 1
    completion: str | None = None
    reference: str | None = None
    """What every prompt expects, instead of its sum."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    compacted: bool = True
    parts: Mapping[str, float] = field(default_factory=dict)
    """Several rewards: name → share of the reward's mean that this one's is."""
    prompts: int = 8
    """Prompts of a step; the last one has the first one's but for three."""
    group_size: int = 1
    warnings: tuple[str, ...] = ()
    failure: Mapping[str, Any] | None = None


def write_run_folder(folder: Path, pretend: SyntheticRun = SyntheticRun()) -> Path:
    """Writes it and returns it."""
    name, steps, seed = pretend.name, pretend.steps, pretend.seed
    manifest_spec: dict[str, Any] = {
        "model": {"uri": "builtin://tiny-adder", "precision": "INT4"},
        "algorithm": {"type": "GRPO", "groupSize": 16},
        "data": {"prompts": [{"uri": "builtin://two-digit-addition"}], "seed": seed},
        "training": {"steps": 60, "learningRate": 2e-3},
        **pretend.spec,
    }
    manifest = {"apiVersion": "orbitrl.dev/v1alpha1", "kind": "OrbitRun", "metadata": {"name": name}}
    run = {
        "name": name,
        "resolved": {**manifest, "spec": manifest_spec},
        "base_digest": BASE,
        "versions": {"orbit-rl": "0.1.0", "python": "3.12.11"},
    }
    _write(folder / "run.json", json.dumps(run))
    rows = [
        _with_parts(synthetic_row(step, start=pretend.start, gain=pretend.gain, seed=seed), pretend.parts)
        for step in range(1, steps + 1)
    ]
    for row in rows:
        _write(folder / f"metrics/step-{row['step']:06d}.json", row.to_json())
    if pretend.compacted and rows:
        _write(folder / "metrics.jsonl", "".join(row.to_json() + "\n" for row in rows))
    for step in range(max(1, steps - 2), steps + 1):
        _write_step(folder, step, steps, pretend.warnings)
    for step in {1, steps} if steps else set():
        first = 0 if step == 1 else 3
        records = [
            each for prompt in range(first, first + pretend.prompts) for each in synthetic_group(step, prompt, pretend)
        ]
        lines = "".join(json.dumps(record) + "\n" for record in records).encode()
        _write(folder / f"rollouts/step-{step:06d}.jsonl.zst", zstandard.ZstdCompressor().compress(lines))
        references = {
            f"addition/{prompt}": pretend.reference or str(21 + prompt) for prompt in range(pretend.prompts + 3)
        }
        _write(folder / f"rollouts/step-{step:06d}.references.json", json.dumps(references))
    state = {"at": pretend.heartbeat_at, "state": "ended" if pretend.ended else "live", "reason": pretend.ended}
    _write(folder / "executions/000001.json", json.dumps({"execution": 1}))
    _write(folder / "executions/000001.heartbeat.json", json.dumps(state))
    if pretend.failure is not None:
        _write(folder / f"failures/step-{steps + 1:06d}.json", json.dumps(pretend.failure))
    return folder


def _with_parts(row: MetricsRow, parts: Mapping[str, float]) -> MetricsRow:
    mean = row.number("reward_mean") or 0.0
    return build_row(**row, **{part_field(name): share * mean for name, share in parts.items()})


def _write_step(folder: Path, step: int, steps: int, warnings: tuple[str, ...]) -> None:
    digest = f"tree:{step:064x}"
    summary = {
        "publishes": step + 1,
        "publishes_proven": step + 1,
        "base_digest_before": BASE,
        "base_digest_after": BASE if step == steps else None,
        "trainable_parameters": 172032,
        "resumed": 0,
        "warnings": list(warnings),
    }
    proof = {
        "version": step,
        "digest": digest,
        "slot_digest": digest,
        "applied_digest": "tree:a",
        "expected_applied_digest": "tree:a",
        "trainer_applied_digest": "tree:a",
        "change_error": 1e-5,
        "change_limit": 1e-3,
        "change_from_base": 3.9,
        "effect": {"scale": 1.0, "margin": 0.1},
        "top1": 1.0,
        "failures": [],
        "unresolved": [],
        "proven": True,
        "verdict": "proven",
    }
    facts = {"step": step, "policy_version": step, "adapter_digest": digest, "proof": proof, "summary": summary}
    _write(folder / f"checkpoints/step-{step:06d}/manifest.json", json.dumps({"format": 1, "facts": facts}))
    adapter = {"format": 1, "facts": {"version": step, "digest": digest}}
    _write(folder / f"adapters/policy-v{step}/manifest.json", json.dumps(adapter))


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
