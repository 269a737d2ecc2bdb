"""The arithmetic of a step: updates of the adapter over packed micro-batches, independent of what computes the passes.

Belongs here: the order of passes within a step, the sums over them, the optimiser. Does not belong here: the
arithmetic of a pass (`algorithms`, `policy`), where passes run (`passes`), publishing and checkpoints (the trainers),
limits of parity (`orbit_runtime.parity`).

Legend: `D` samples, `R` trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
import torch

from orbit_runtime.algorithms.custom_loss import LOSS
from orbit_runtime.algorithms.losses import LossInputs, policy_loss, token_weights
from orbit_runtime.algorithms.objective import own_loss_of
from orbit_runtime.algorithms.ratios import importance_weights
from orbit_runtime.data.packing import pack_micro_batches, split_mini_batches
from orbit_runtime.data.samples import count_trained
from orbit_runtime.errors import DivergedError
from orbit_runtime.policy.routing import OWN_CHOICE
from orbit_runtime.seeds import stream_key
from orbit_runtime.training.critic import Critic, explained_variance
from orbit_runtime.training.micro_batches import MicroBatch, build_micro_batch, deal
from orbit_runtime.training.passes import Passes, Teacher, TrainingPass
from orbit_runtime.training.settings import TrainerSettings, learning_rate
from orbit_runtime.types import FLOATS, Computed, Sample, StateWriter, UpdateResult

K3_CLAMP = 10.0
RATIOS = (0.9, 1.1)


def as_floats(values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Single values, for all of which the host waits once."""
    return dict(zip(values, torch.stack([value.double() for value in values.values()]).tolist(), strict=True))


class ParitySums:
    """Collects `d = logp_trainer - logp_sampler` over the first mini-batch, where both sides hold the same policy."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []

    def add(self, trainer_R: torch.Tensor, sampler_R: torch.Tensor, stale_R: torch.Tensor | None) -> None:
        """Args: stale_R: 1 where another policy sampled the token; None if there is no such token."""
        d_R = trainer_R - sampler_R
        self._parts.append(d_R if stale_R is None else d_R[stale_R == 0])

    def metrics(self, collect: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Statistics over all tokens; empty if there are none.

        `parity_mean, parity_p99, parity_max` of |d|; `parity_k3`: mean of exp(d) - 1 - d, d clamped to ±10;
        `parity_outside`: share of tokens with exp(d) outside [0.9, 1.1], NaN included; `parity_tokens`.

        Args:
            collect: maps this replica's values to those of all replicas.
        """
        d = collect(torch.cat(self._parts) if self._parts else torch.zeros(0)).double()
        if not d.numel():
            return {}
        size = d.abs()
        low, high = (math.log(ratio) for ratio in RATIOS)
        inside = (d >= low) & (d <= high)
        clamped = d.clamp(-K3_CLAMP, K3_CLAMP)
        found = {
            "parity_mean": size.mean(),
            "parity_p99": torch.quantile(size, 0.99) if size.numel() < 1 << 24 else size.max(),
            "parity_max": size.max(),
            "parity_k3": (torch.expm1(clamped) - clamped).mean(),
            "parity_outside": (~inside).double().mean(),
        }
        return as_floats(found) | {"parity_tokens": d.numel()}


class MiniBatchLoss:
    """The loss of each pass over one mini-batch: a `passes.LossOf`."""

    def __init__(
        self,
        loss: Callable[..., Any],
        settings: TrainerSettings,
        old: Mapping[int, torch.Tensor],
        totals: dict[str, float],
        parity: ParitySums | None,
        shown: list[torch.Tensor] | None,
    ) -> None:
        """
        Args:
            old: log-probs of the old policy, by the micro-batch's number; without them, those of the pass itself.
            totals: the step's sums over tokens, to which each pass adds.
            parity: to which each pass adds; None if it is not measured.
            shown: to which a pass adds the entropies of the sample that is shown; None if they are not asked for.
        """
        self._loss, self._settings, self._old, self._parity = loss, settings, old, parity
        self.totals, self._shown = totals, shown
        self.is_finite = True

    def __call__(
        self, micro: MicroBatch, all_R: torch.Tensor, entropy_R: torch.Tensor, distances_R: torch.Tensor | None
    ) -> torch.Tensor:
        settings, logprobs_R = self._settings, all_R[micro.trained_R]
        # Demonstrations were not sampled by any engine: the policy is compared with itself.
        sampled_R = micro.columns_R.get("sampled", logprobs_R.detach())
        old_R, importance_R = sampled_R, None
        if settings.correction is not None:
            old_R = self._old.get(micro.number, logprobs_R.detach())
            importance_R = importance_weights(old_R, sampled_R, micro.lengths_D, settings.correction)
        inputs = LossInputs(
            logprobs_R,
            old_R,
            micro.columns_R["advantage"],
            micro.lengths_D,
            reference_logprobs_T=micro.columns_R.get("reference"),
            importance_T=importance_R,
            teacher_logprobs_T=micro.columns_R.get("teacher"),
            distances_T=distances_R,
            entropies_T=entropy_R[micro.trained_R],
        )
        loss, sums = self._loss(inputs, micro.weights_R, settings.loss)
        if not micro.counts:
            return 0.0 * loss  # type: ignore[no-any-return]
        if self._parity is not None and "sampled" in micro.columns_R:
            self._parity.add(logprobs_R.detach(), sampled_R, micro.columns_R.get("stale"))
        entropy_R = entropy_R.detach()[micro.trained_R]
        if self._shown is not None and any(each.is_shown for each in micro.samples):
            pieces = entropy_R.split([count_trained(each.loss_mask_T) for each in micro.samples])
            self._shown += compress(pieces, [each.is_shown for each in micro.samples])
        values = as_floats(sums | {"entropy": entropy_R.sum()})
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, 0.0) + value
        self.is_finite = self.is_finite and math.isfinite(values["loss"])
        return loss  # type: ignore[no-any-return]


class Updater:
    """Owns optimiser and counters. With several ranks, each rank has one, and all get the same samples."""

    def __init__(
        self,
        passes: Passes,
        settings: TrainerSettings,
        loss: Callable[..., Any] = policy_loss,
        critic: Critic | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.critic = critic
        self.teacher = teacher
        self._passes = passes
        self._settings = settings
        self._loss = loss
        self._own_loss = own_loss_of(loss)
        self.optimizer = torch.optim.AdamW(
            # A rank may own nothing: a group of parameters may be empty, a list of them may not.
            [{"params": list(passes.owned.values())}],
            lr=settings.training.decided_rate,
            weight_decay=settings.training.weight_decay,
            fused=True,
        )
        self.updates = 0
        """Optimiser updates since the run began."""
        self.steps = 0
        self.reader: StateWriter | None = None
        """Writer that may still be reading masters and moments."""

    def let_be_read(self) -> None:
        """Call before masters or moments change: a checkpoint written during this step needs the old values."""
        if self.reader is not None:
            self.reader.wait()
            self.reader = None

    def take_rates(self, policy: float, critic: float) -> None:
        """Trains on with these peak learning rates; that of the critic counts where there is one."""
        training = self._settings.training.model_copy(update={"learning_rate": policy})
        self._settings = replace(self._settings, training=training)
        if self.critic is not None:
            self.critic.settings = replace(self.critic.settings, peak_learning_rate=critic)

    @property
    def counters(self) -> dict[str, int]:
        return {"updates": self.updates, "steps": self.steps}

    def update(self, samples_D: Sequence[Sample]) -> UpdateResult:
        """One step: `update_epochs` passes over the samples, one optimiser update per mini-batch.

        Raises:
            DivergedError: a loss or gradient is not finite; masters and moments are those before that update. With
                several ranks, all of them raise it.
        """
        settings = self._settings
        if not samples_D:
            self.steps += 1
            return UpdateResult({}, 0, 0)
        mini_batches = [
            self._micro_batches(samples_D, indexes)
            for indexes in split_mini_batches(samples_D, settings.training.mini_batch_prompts)
        ]
        updates = len(mini_batches) * settings.training.update_epochs
        # With a single update, the old policy is the current one, and its log-probs need no extra pass.
        old_needed = settings.correction is not None and updates > 1
        old = [
            {each.number: self._passed(each, of="policy") for each in micro} if old_needed else {}
            for micro in mini_batches
        ]
        totals: dict[str, float] = {}
        replayed = self._replay_parity(mini_batches[0][0])
        parity, shown = ParitySums(), list[torch.Tensor]()
        norms = value_losses = 0.0
        # A policy that waits for its critic to warm up is measured as usual, but not changed.
        is_held = self.critic is not None and self.steps < self.critic.settings.warmup_steps
        for epoch in range(settings.training.update_epochs):
            for number, micro in enumerate(mini_batches):
                first = epoch == 0 and number == 0
                loss_of = MiniBatchLoss(
                    self._loss, settings, old[number], totals, parity if first else None, None if epoch else shown
                )
                self._passes.forward_backward(self._training_passes(micro), settings.sampling, loss_of)
                self._check_loss(loss_of)
                norms += self._hold_gradient() if is_held else self._apply_gradient()
                if self.critic is not None:
                    value_losses += self._update_critic(self.critic, micro)
        tokens = sum(count_trained(sample.loss_mask_T) for sample in samples_D)
        metrics = self._metrics(self._total(totals), norms, updates)
        if self.critic is not None:
            metrics |= {"value_loss": value_losses / updates} | explained_variance(samples_D)
        self.steps += 1
        if self.teacher is not None and updates > 0:
            self.let_be_read()
            self.teacher.follow(self.steps)
        metrics |= parity.metrics(self._passes.collect) | replayed
        entropies_T = self._passes.collect(torch.cat(shown or [torch.zeros(0)])).tolist()
        return UpdateResult(metrics, updates, tokens, tuple(entropies_T))

    def _check_loss(self, loss_of: MiniBatchLoss) -> None:
        """Raises DivergedError if the loss of one of the mini-batch's passes, on any rank, is not finite."""
        # Every rank must reach the same outcome, so none raises within its passes.
        problems = self._own_loss.take_problems() if self._own_loss else []
        found = self._passes.largest(_OWN_LOSS if problems else 0.0 if loss_of.is_finite else 1.0)
        if found == _OWN_LOSS:
            self._discard_own(problems)
        if found:
            self._discard(f"the loss is {self._total({'loss': loss_of.totals.get('loss', 0.0)})['loss']}")

    def _total(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum over replicas of values that all processes of one replica know."""
        return self._passes.total(values if self._passes.leads else {})

    def _training_passes(self, micro_batches: Sequence[MicroBatch]) -> Iterator[TrainingPass]:
        for micro in micro_batches:
            key = stream_key(self._settings.seed, "dropout", self.updates, micro.number)
            yield TrainingPass(micro, self._replayed(micro), key)

    def _discard(self, problem: str) -> None:
        self._drop_gradients()
        own = f" (the loss is your own {self._own_loss.target!r})" if self._own_loss else ""
        raise DivergedError(f"{problem}{own} at {self._now}", fix=_DIVERGED_FIX)

    @property
    def _now(self) -> str:
        return f"step {self.steps + 1}, optimizer update {self.updates}"

    def _discard_own(self, problems: Sequence[str]) -> None:
        """Args: problems: what this rank saw; another may have seen what this one did not."""
        assert self._own_loss is not None
        problem = problems[0] if problems else "made a value on another rank that is not finite"
        self._drop_gradients()
        raise DivergedError(
            f"{self._own_loss.target!r} {problem}, at {self._now}: all that it was given is finite",
            where=LOSS,
            fix=_OWN_LOSS_FIX,
        )

    def _apply_gradient(self) -> float:
        """Returns the gradient norm before clipping."""
        settings = self._settings
        norm = self._passes.finish_gradients()
        value = float(norm)
        if not math.isfinite(value):
            self._discard(f"the gradient norm is {value}")
        torch.nn.utils.clip_grads_with_norm_(self._passes.owned.values(), settings.training.max_grad_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self.let_be_read()
        self.optimizer.step()
        self._drop_gradients()
        self.updates += 1
        self._passes.finish_update()
        return value

    def _hold_gradient(self) -> float:
        norm = float(self._passes.finish_gradients())
        self._drop_gradients()
        return norm

    def _drop_gradients(self) -> None:
        for master in self._passes.masters.parameters.values():
            master.grad = None

    def _update_critic(self, critic: Critic, micro_batches: Sequence[MicroBatch]) -> float:
        loss = self._total({"loss": critic.accumulate(micro_batches)})["loss"]
        self.let_be_read()
        norm = critic.apply_gradient(self._learning_rate(critic.settings.peak_learning_rate))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(
                f"the critic's loss is {loss}, its gradient's norm {norm}, at its optimizer update {critic.updates}",
                fix="lower spec.algorithm.critic.learningRate; the step's evidence is kept in the run folder",
            )
        return loss

    def _learning_rate(self, peak: float | None = None) -> float:
        """The policy's rate, or the rate of a part with another peak under the same schedule."""
        settings = self._settings
        return learning_rate(
            self.steps,
            settings.training.schedule,
            peak=settings.training.decided_rate if peak is None else peak,
            decay_steps=settings.decay_steps,
        )

    def _metrics(self, totals: Mapping[str, float], norms: float, updates: int) -> dict[str, float]:
        """Turns sums over tokens into means over tokens, and sums over updates into means over updates."""
        tokens = max(1.0, totals.get("tokens", 0.0))
        means = {name: totals[name] / tokens for name in _TOKEN_MEANS if name in totals}
        per_update = {"loss": totals.get("loss", 0.0) / max(1, updates), "grad_norm": norms / max(1, updates)}
        masters = self._passes.masters
        series = {}
        if masters.config.type == "OFT":
            series["oft_series_error"] = self._passes.largest(masters.series_error())
        return means | per_update | {"learning_rate": self._learning_rate()} | series

    def _micro_batches(self, samples_D: Sequence[Sample], indexes: Sequence[int]) -> list[MicroBatch]:
        """The micro-batches of a mini-batch that this replica computes."""
        settings = self._settings
        lengths = [count_trained(samples_D[index].loss_mask_T) for index in indexes]
        weights = token_weights(lengths, settings.reduction, settings.constant_length)
        weight_of = dict(zip(indexes, weights, strict=True))
        parts = pack_micro_batches(samples_D, settings.training.micro_batch_tokens, indexes)
        return [
            self._micro_batch(samples_D, parts[number], weight_of, number=number, counts=counts)
            for number, counts in deal(len(parts), self._passes.replica)
        ]

    def _micro_batch(
        self,
        samples_D: Sequence[Sample],
        part: Sequence[int],
        weight_of: Mapping[int, float],
        *,
        number: int = 0,
        counts: bool = True,
    ) -> MicroBatch:
        return build_micro_batch(
            [samples_D[index] for index in part],
            [weight_of[index] for index in part],
            self._passes.pack,
            self._settings.sampling,
            self._passes.device,
            number=number,
            counts=counts,
        )

    # --- passes without gradient ---

    def _replayed(self, micro: MicroBatch) -> torch.Tensor | None:
        return self._passes.routed_tokens(micro) if self._settings.router_replay == "Replay" else None

    def _replay_parity(self, micro: MicroBatch) -> dict[str, float]:
        """Parity on a replica's first micro-batch, under the policy before the step: with the experts chosen during
        rollout, and with the trainer's own choice.

        `router_agreement`: share of rollout's choices that the trainer's routers also make, given the same earlier
        choices.
        """
        passes, routing = self._passes, self._passes.routing
        if self._settings.router_replay == "None" or not passes.routes:
            return {}
        routed_TLC = passes.routed_tokens(micro)
        if not passes.largest(0.0 if routed_TLC is None else 1.0):
            return {}
        own_R = self._logprobs(micro, of="policy", routed_TLC=None)
        with routing.preferred() if routing else nullcontext() as preferred:
            given_R = self._logprobs(micro, of="policy", routed_TLC=routed_TLC)
        counted: dict[str, float] = {"agreeing": 0, "known": 0, "replayed": 0, "unreplayed": 0, "tokens": 0}
        if routed_TLC is not None and micro.counts:
            if preferred is not None:
                known_TLC = routed_TLC != OWN_CHOICE
                agreeing_TLC = (routed_TLC.unsqueeze(-1) == preferred().unsqueeze(-2)).any(-1) & known_TLC
                counted |= {"agreeing": int(agreeing_TLC.sum()), "known": int(known_TLC.sum())}
            if passes.leads:
                sampled_R = micro.columns_R["sampled"]
                counted |= {
                    "tokens": len(given_R),
                    "replayed": float((given_R - sampled_R).abs().double().sum()),
                    "unreplayed": float((own_R - sampled_R).abs().double().sum()),
                }
        summed = passes.total(counted)
        return {
            "parity_mean_replayed": summed["replayed"] / summed["tokens"],
            "parity_mean_unreplayed": summed["unreplayed"] / summed["tokens"],
            "router_agreement": summed["agreeing"] / max(1.0, summed["known"]),
        }

    def _passed(self, micro: MicroBatch, *, of: Computed) -> torch.Tensor:
        """Runs like the step's own passes: with rollout's experts if they are replayed."""
        return self._logprobs(micro, of=of, routed_TLC=self._replayed(micro))

    def _logprobs(self, micro: MicroBatch, *, of: Computed, routed_TLC: torch.Tensor | None) -> torch.Tensor:
        """fp32 log-probs of the trained tokens, without gradient."""
        all_R = self._passes.logprobs(micro, self._settings.sampling, of=of, routed_TLC=routed_TLC)
        return all_R[micro.trained_R]

    def column(self, name: Computed, samples_D: Sequence[Sample]) -> dict[int, array[float]]:
        """See `Trainer.column`: values of the samples that this replica computes, by their index."""
        read = self._reader(name)
        columns: dict[int, array[float]] = {}
        parts = pack_micro_batches(samples_D, self._settings.training.micro_batch_tokens)
        for number, counts in deal(len(parts), self._passes.replica):
            part = parts[number]
            micro = self._micro_batch(samples_D, part, dict.fromkeys(part, 0.0), number=number, counts=counts)
            lengths = [count_trained(samples_D[index].loss_mask_T) for index in part]
            pieces = read(micro).cpu().split(lengths)
            for index, piece in zip(part if counts else (), pieces, strict=counts):
                column_T = np.zeros(len(samples_D[index].token_ids_T), np.float32)
                column_T[np.flatnonzero(samples_D[index].loss_mask_T)] = piece.numpy()
                columns[index] = array(FLOATS, column_T.tobytes())
        return columns

    def _reader(self, name: Computed) -> Callable[[MicroBatch], torch.Tensor]:
        """Computes a column's value for each trained token of a micro-batch."""
        if name == "value":
            assert self.critic is not None, "the algorithm has a critic"
            return self.critic.values
        if name == "teacher":
            assert self.teacher is not None, "the algorithm has a teacher"
            teacher, sampling = self.teacher, self._settings.sampling
            return lambda micro: teacher.logprobs(micro, sampling, self._replayed(micro))
        return partial(self._passed, of=name)


_TOKEN_MEANS = ("kl", "kl_old", "clip_fraction", "dropped_fraction", "entropy", "teacher_divergence")

_OWN_LOSS = 2.0
"""Above a loss that is not finite for another reason, where ranks agree on the worst."""
_OWN_LOSS_FIX = (
    "correct the function: keep log(), sqrt() and a division away from 0, and exp() from large numbers, in what "
    "torch.where() does not choose too; the step's evidence is kept in the run folder"
)
_DIVERGED_FIX = (
    "lower spec.training.learningRate, or set spec.training.maxGradNorm; the step's evidence is kept in the run folder"
)
