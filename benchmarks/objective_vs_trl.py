"""Advantages, loss and reduction of a million tokens, forward and backward on a CPU, against TRL's own code.

Belongs here: both sides on the same log-probs. Does not belong here: whether they are equal
(`tests/integration/test_objectives_against_trl.py`), or computing log-probs.

TRL's side is `GRPOTrainer._compute_loss` and the preceding lines that compute advantages from rewards; its tensors are
padded, as in its trainer. Ours starts from rewards as Python numbers and ends with the gradient, including its columns
and weights.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Comparison, Measured, compare, need_packages, run, table

MEASURES = ("orbit_runtime/algorithms", "orbit_runtime/data/samples.py", "orbit_runtime/training/micro_batches.py")
TOKENS, SAMPLES, GROUP = 1 << 20, 1024, 16
BETA, LOW, HIGH = 0.04, 0.2, 0.28
TARGET = 1.0
"""Our time is at most TRL's."""


def lengths_of(kind: str, tokens: int, samples: int) -> list[int]:
    """`even`: no padding. `long-tailed`: half of the answers are short, a few are long."""
    mean = tokens // samples
    if kind == "even":
        return [mean] * samples
    return [(mean // 2, mean // 2, mean, 2 * mean)[index % 4] for index in range(samples)]


def compare_sides(kind: str, algorithm: str, options: argparse.Namespace) -> Comparison:
    import torch

    tokens, samples = (4096, 64) if options.smallest else (TOKENS, SAMPLES)
    lengths = lengths_of(kind, tokens, samples)
    generator = torch.Generator().manual_seed(0)
    shape = (samples, max(lengths))
    logprobs = -torch.rand(shape, generator=generator)
    old, reference = (logprobs + 0.1 * torch.randn(shape, generator=generator) for _ in range(2))
    mask = (torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]).long()
    rewards = torch.rand(samples, generator=generator)
    ours = our_side(
        algorithm, [values[mask.bool()] for values in (logprobs, old, reference)], rewards.tolist(), lengths
    )
    theirs = trl_side(algorithm, logprobs, old, reference, mask, rewards)
    name = f"{algorithm}, {tokens} tokens of {samples} answers, {kind}"
    return compare(name, ("Orbit", ours), ("TRL", theirs), repetitions=options.repetitions, target=TARGET)


def our_side(algorithm: str, flat: Sequence[Any], rewards: Sequence[float], lengths: Sequence[int]) -> Any:
    import numpy as np
    import torch

    from orbit_runtime.algorithms.advantages import ScoredGroup
    from orbit_runtime.algorithms.losses import LossInputs, token_weights
    from orbit_runtime.algorithms.objective import build_loss
    from orbit_runtime.algorithms.table import build_algorithm, loss_settings
    from orbit_runtime.data.samples import spread
    from orbit_runtime.spec.algorithm import Algorithm

    settings = Algorithm.model_validate(
        {
            "type": algorithm,
            "kl": {"coefficient": BETA},
            **({"clip": {"low": LOW, "high": HIGH}} if algorithm == "GRPO" else {}),
        }
    )
    built, policy_loss, constants = build_algorithm(settings), build_loss(settings), loss_settings(settings)
    logprobs_T, old_T, reference_T = flat
    masks_D = [array("b", bytes([1]) * length) for length in lengths]

    def step() -> Any:
        groups = [
            ScoredGroup(rewards[first : first + GROUP], lengths[first : first + GROUP])
            for first in range(0, len(rewards), GROUP)
        ]
        advantages_D = [each for group in built.advantages(groups) for each in group]
        columns = [spread(each, mask_T) for each, mask_T in zip(advantages_D, masks_D, strict=True)]
        # As `micro_batches.build_micro_batch` joins them.
        advantages_T = torch.from_numpy(np.concatenate([np.asarray(column) for column in columns]))
        weights_D = token_weights(lengths, settings.objective.reduction, max(lengths))
        weights_T = torch.from_numpy(np.repeat(np.asarray(weights_D, np.float32), lengths))
        given_T = logprobs_T.clone().requires_grad_(True)
        inputs = LossInputs(given_T, old_T, advantages_T, torch.tensor(lengths), reference_logprobs_T=reference_T)
        loss, _ = policy_loss(inputs, weights_T, constants)
        loss.backward()
        return given_T.grad

    return step


def trl_side(algorithm: str, logprobs: Any, old: Any, reference: Any, mask: Any, rewards: Any) -> Any:
    import torch
    from trl import GRPOTrainer

    class Given(GRPOTrainer):  # type: ignore[misc]
        """The parts of the trainer that its loss reads; log-probs are passed in."""

        def __init__(self) -> None:
            gspo = algorithm == "GSPO"
            self.loss_type, self.beta = ("grpo" if gspo else "bnpo"), BETA
            self.epsilon_low, self.epsilon_high = (3e-4, 4e-4) if gspo else (LOW, HIGH)
            self.importance_sampling_level = "sequence" if gspo else "token"
            self.top_entropy_quantile, self.off_policy_mask_threshold = 1.0, None
            self.max_completion_length, self.current_gradient_accumulation_steps = mask.shape[1], 1
            self.args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
            self.use_vllm = self.vllm_importance_sampling_correction = False
            self.aux_loss_enabled = self._entropy_bonus_enabled = self.use_adaptive_entropy = False
            self.model = SimpleNamespace(training=True)
            self.accelerator = SimpleNamespace(
                gather=lambda tensor: tensor, reduce=lambda tensor, reduction: tensor, num_processes=1
            )
            self._metrics = {"train": defaultdict(list)}

        def _get_per_token_logps_and_entropies(self, *args: object, **kwargs: object) -> tuple[Any, ...]:
            return self.given, entropies, None

    trainer, entropies = Given(), torch.zeros_like(logprobs)
    empty, completions = torch.zeros(len(mask), 1, dtype=torch.long), torch.zeros_like(mask)

    def step() -> Any:
        grouped = rewards.view(-1, GROUP)
        mean, deviation = (each.repeat_interleave(GROUP, dim=0) for each in (grouped.mean(dim=1), grouped.std(dim=1)))
        trainer.given = logprobs.clone().requires_grad_(True)
        loss = trainer._compute_loss(
            trainer.model,
            {
                "prompt_ids": empty,
                "prompt_mask": empty,
                "completion_ids": completions,
                "completion_mask": mask,
                "advantages": (rewards - mean) / (deviation + 1e-4),
                "old_per_token_logps": old,
                "ref_per_token_logps": reference,
                "num_items_in_batch": mask.sum(),
            },
        )
        loss.backward()
        return trainer.given.grad

    return step


def measure(options: argparse.Namespace) -> Measured:
    need_packages("trl", install="pip install 'orbit-rl[train,dev]'")
    rows = [
        compare_sides(kind, algorithm, options) for algorithm in ("GRPO", "GSPO") for kind in ("even", "long-tailed")
    ]
    print(table(rows))
    return Measured(rows)


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure))
