"""The torch trainer: GRPO updates of the adapter over packed micro-batches.

Belongs here: the order of passes within a step. Does not belong here: each pass's arithmetic (`algorithms`, `policy`).

Legend: `D` samples, `R` trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Buffer, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.adapters.state import applied_digest, write_adapter
from orbit_runtime.algorithms.losses import PolicyLossSettings, policy_loss, truncated_importance
from orbit_runtime.algorithms.reduction import Reduction, token_weights
from orbit_runtime.data.packing import pack_micro_batches, split_mini_batches
from orbit_runtime.data.routing import unpack_experts
from orbit_runtime.errors import DivergedError
from orbit_runtime.policy.model import Policy
from orbit_runtime.policy.packed import Branch, PackedBatch, lay_out_experts
from orbit_runtime.policy.routing import OWN_CHOICE
from orbit_runtime.policy.seen import Seen, build_seen
from orbit_runtime.seeds import stream_key
from orbit_runtime.training.parity import ParitySums
from orbit_runtime.training.schedule import Schedule, learning_rate
from orbit_runtime.training.state import PART, build_state, unpack_state
from orbit_runtime.types import (
    FLOATS,
    AdapterManifest,
    AdapterSink,
    ColumnName,
    Sample,
    Sampling,
    Scored,
    StateWriter,
    UpdateResult,
)

RouterReplay = Literal["None", "Record", "Replay"]


@dataclass(frozen=True)
class TrainerSettings:
    """Everything the arithmetic of a step depends on, in the units of the manifest."""

    peak_learning_rate: float
    schedule: Schedule
    warmup_steps: int
    decay_steps: int
    weight_decay: float
    max_grad_norm: float
    micro_batch_tokens: int
    mini_batch_prompts: int | None
    update_epochs: int
    loss: PolicyLossSettings
    reduction: Reduction
    constant_length: int
    """Tokens that the `Constant` reduction divides by: the longest completion allowed."""
    importance_cap: float | None
    """Truncation of trainer/sampler importance weights; `None`: the sampling side's log-probs are the old ones."""
    sampling: Sampling
    """What the samples' tokens were drawn by."""
    base_model: str
    """Named in the published `adapter_config.json`."""
    seed: int = 0
    """Of dropout."""
    router_replay: RouterReplay = "None"
    """`Replay`: every pass sends tokens to the experts that rollout chose, the reference's too. With it and with
    `Record` a step measures parity with and without."""


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass; flat over its trained tokens."""

    samples: Sequence[Sample]
    branches: Sequence[Branch]
    packed: PackedBatch
    columns_R: Mapping[ColumnName, torch.Tensor]
    """Of the trained tokens, fp32."""
    weights_R: torch.Tensor
    trained_R: torch.Tensor
    """Targets that the loss mask keeps, as indices into the packed targets."""
    seen: Seen | None
    """Tokens before each target, where sampling penalises their repetition."""


class TorchTrainer:
    """A `Trainer` in this process, on the policy that the torch engine shares."""

    def __init__(self, policy: Policy, settings: TrainerSettings, loss: Callable[..., Any] = policy_loss) -> None:
        self._loss = loss
        self._policy = policy
        self._settings = settings
        self._masters = policy.injected.masters.parameters
        self._optimizer = torch.optim.AdamW(
            list(self._masters.values()),
            lr=settings.peak_learning_rate,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._updates = 0
        self._steps = 0
        self._reader: StateWriter | None = None
        """Who may still be reading masters and moments."""

    @property
    def trainable_parameters(self) -> int:
        return sum(master.numel() for master in self._masters.values())

    def update(self, samples_D: Sequence[Sample]) -> UpdateResult:
        """One step: `update_epochs` passes over the samples, an optimizer update per mini-batch.

        Raises:
            DivergedError: a loss or gradient is not finite; masters and moments are those before that update.
        """
        settings = self._settings
        if not samples_D:
            self._steps += 1
            return UpdateResult({}, 0, 0)
        mini_batches = [
            self._micro_batches(samples_D, indexes)
            for indexes in split_mini_batches(samples_D, settings.mini_batch_prompts)
        ]
        updates = len(mini_batches) * settings.update_epochs
        # With one update the policy before it is the policy in it, and its log-probs need no pass of their own.
        old_needed = settings.importance_cap is not None and updates > 1
        old = [[self._passed(m, adapter=True) for m in micro] for micro in mini_batches] if old_needed else None
        totals: dict[str, float] = {}
        replayed = self._replay_parity(mini_batches[0][0])
        parity = ParitySums()
        for epoch in range(settings.update_epochs):
            for number, micro in enumerate(mini_batches):
                first = epoch == 0 and number == 0
                self._accumulate(
                    micro,
                    old[number] if old else None,
                    totals,
                    parity if first else None,
                )
                self._apply_gradient(totals)
        self._steps += 1
        tokens = sum(len(m.trained_R) for micro in mini_batches for m in micro)
        metrics = self._metrics(totals, updates) | parity.metrics() | replayed
        return UpdateResult(metrics, updates, tokens)

    def _accumulate(
        self,
        micro_batches: list[MicroBatch],
        old: list[torch.Tensor] | None,
        totals: dict[str, float],
        parity: ParitySums | None,
    ) -> None:
        """Adds the gradient of one mini-batch to the masters, a micro-batch at a time."""
        settings = self._settings
        for number, micro in enumerate(micro_batches):
            with self._policy.injected.selection.use(TRAINER_SLOT, dropout_key=self._dropout_key(number)):
                all_R, entropy_R = self._policy.logprobs(
                    micro.packed, sampling=settings.sampling, seen=micro.seen, routed_TLC=self._replayed(micro)
                )
            logprobs_R = all_R[micro.trained_R]
            sampled_R = micro.columns_R["sampled"]
            old_R, importance_R = sampled_R, None
            if settings.importance_cap is not None:
                old_R = old[number] if old else logprobs_R.detach()
                importance_R = truncated_importance(old_R, sampled_R, settings.importance_cap)
            loss, sums = self._loss(
                logprobs_R,
                old_R,
                micro.columns_R["advantage"],
                micro.weights_R,
                settings.loss,
                reference_logprobs_T=micro.columns_R.get("reference"),
                importance_T=importance_R,
            )
            if parity is not None:
                parity.add(logprobs_R.detach(), sampled_R)
            values = {name: float(value) for name, value in sums.items()}
            values["entropy"] = float(entropy_R[micro.trained_R].sum())
            for name, value in values.items():
                totals[name] = totals.get(name, 0.0) + value
            if not math.isfinite(values["loss"]):
                raise DivergedError(
                    f"the loss is {values['loss']} at optimizer update {self._updates}", fix=_DIVERGED_FIX
                )
            loss.backward()

    def _dropout_key(self, micro_batch: int) -> int:
        return stream_key(self._settings.seed, "dropout", self._updates, micro_batch)

    def _apply_gradient(self, totals: dict[str, float]) -> None:
        settings = self._settings
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), settings.max_grad_norm)
        value = float(norm)
        if not math.isfinite(value):
            self._optimizer.zero_grad(set_to_none=True)
            raise DivergedError(f"the gradient norm is {value} at optimizer update {self._updates}", fix=_DIVERGED_FIX)
        rate = learning_rate(
            self._steps,
            peak=settings.peak_learning_rate,
            schedule=settings.schedule,
            warmup_steps=settings.warmup_steps,
            decay_steps=settings.decay_steps,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._let_be_read()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._updates += 1
        self._policy.injected.masters.constrain()
        totals["grad_norm"] = totals.get("grad_norm", 0.0) + value
        totals["learning_rate"] = rate

    def _metrics(self, totals: Mapping[str, float], updates: int) -> dict[str, float]:
        """Token sums become means over tokens, per-update numbers means over updates."""
        tokens = max(1.0, totals.get("tokens", 0.0))
        means = {name: totals[name] / tokens for name in ("kl", "kl_old", "clip_fraction", "entropy") if name in totals}
        per_update = {name: totals.get(name, 0.0) / max(1, updates) for name in ("loss", "grad_norm")}
        masters = self._policy.injected.masters
        series = {"oft_series_error": masters.series_error()} if masters.config.type == "OFT" else {}
        return means | per_update | {"learning_rate": totals.get("learning_rate", 0.0)} | series

    def _micro_batches(self, samples_D: Sequence[Sample], indexes: Sequence[int]) -> list[MicroBatch]:
        settings = self._settings
        lengths = [sum(samples_D[index].loss_mask_T) for index in indexes]
        weights = token_weights(lengths, settings.reduction, settings.constant_length)
        weight_of = dict(zip(indexes, weights, strict=True))
        return [
            self._micro_batch([samples_D[index] for index in part], [weight_of[index] for index in part])
            for part in pack_micro_batches(samples_D, settings.micro_batch_tokens, indexes)
        ]

    def _micro_batch(self, samples: Sequence[Sample], weights: Sequence[float]) -> MicroBatch:
        device = self._policy.device
        branches, kept_D, trained = [], [], []
        offset = 0
        for sample in samples:
            cut, tokens_T = sample.prefix_length, sample.token_ids_T
            branches.append(Branch(sample.prefix_id, tokens_T[:cut], tokens_T[cut:]))
            kept = np.flatnonzero(sample.loss_mask_T)
            kept_D.append(kept)
            trained.append(offset + kept - cut)
            offset += len(tokens_T) - cut

        def joined(parts: Sequence[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(parts)).to(device)

        columns_R = {
            name: joined([np.asarray(each.columns[name])[kept] for each, kept in zip(samples, kept_D, strict=True)])
            for name in samples[0].columns
        }
        weights_R = joined(
            [np.full(len(kept), weight, np.float32) for kept, weight in zip(kept_D, weights, strict=True)]
        )
        seen = build_seen(branches, device) if self._settings.sampling.repetition_penalty != 1.0 else None
        return MicroBatch(samples, branches, self._policy.pack(branches), columns_R, weights_R, joined(trained), seen)

    def _replayed(self, micro: MicroBatch) -> torch.Tensor | None:
        return _routed_tokens(micro) if self._settings.router_replay == "Replay" else None

    def _replay_parity(self, micro: MicroBatch) -> dict[str, float]:
        """Of one micro-batch under the policy before the step: through the experts of rollout, and through its own.

        `router_agreement`: share of rollout's choices that the trainer's routers make too, behind the same choices.
        """
        routing = self._policy.routing
        routed_TLC = None if self._settings.router_replay == "None" else _routed_tokens(micro)
        if routing is None or routed_TLC is None:
            return {}
        own_R = self._logprobs(micro, adapter=True, routed_TLC=None)
        with routing.preferred() as preferred:
            given_R = self._logprobs(micro, adapter=True, routed_TLC=routed_TLC)
        known_TLC = routed_TLC != OWN_CHOICE
        agreeing_TLC = (routed_TLC.unsqueeze(-1) == preferred().unsqueeze(-2)).any(-1) & known_TLC
        return {
            "parity_mean_replayed": float((given_R - micro.columns_R["sampled"]).abs().double().mean()),
            "parity_mean_unreplayed": float((own_R - micro.columns_R["sampled"]).abs().double().mean()),
            "router_agreement": float(agreeing_TLC.sum() / known_TLC.sum().clamp(min=1)),
        }

    def _passed(self, micro: MicroBatch, *, adapter: bool) -> torch.Tensor:
        """As the step's own passes are: through rollout's experts where they are replayed."""
        return self._logprobs(micro, adapter=adapter, routed_TLC=self._replayed(micro))

    def _logprobs(self, micro: MicroBatch, *, adapter: bool, routed_TLC: torch.Tensor | None) -> torch.Tensor:
        """fp32 log-probs of the trained tokens, without gradient; with `adapter` off, the reference policy's."""
        with torch.no_grad(), self._policy.injected.selection.use(TRAINER_SLOT if adapter else None):
            logprobs, _ = self._policy.logprobs(
                micro.packed, sampling=self._settings.sampling, seen=micro.seen, routed_TLC=routed_TLC
            )
        return logprobs[micro.trained_R]

    # --- publishing and proof ---

    def publish(self, sink: AdapterSink) -> AdapterManifest:
        injected = self._policy.injected
        return write_adapter(injected, injected.config, self._settings.base_model, sink)

    def score(self, token_ids_T: Sequence[int]) -> tuple[Scored, Scored]:
        """One packed pass over the sequence twice: with the masters' published rounding, and with the bare base."""
        first, rest = tuple(token_ids_T[:1]), tuple(token_ids_T[1:])
        batch = self._policy.pack([Branch(0, first, rest), Branch(1, first, rest)])
        middle = len(batch.token_ids_T) // 2
        segments = [(TRAINER_SLOT, 0, middle), (None, middle, 2 * middle)]
        with torch.no_grad(), self._policy.injected.selection.use(segments), self._policy.traced() as trace:
            logprobs, _ = self._policy.logprobs(batch)
        adapted, base = logprobs.view(2, -1).tolist()
        return Scored((0.0, *adapted), applied_digest(trace)), Scored((0.0, *base), None)

    def reference_logprobs(self, samples_D: Sequence[Sample]) -> list[array[float]]:
        columns: dict[int, array[float]] = {}
        for part in pack_micro_batches(samples_D, self._settings.micro_batch_tokens):
            micro = self._micro_batch([samples_D[index] for index in part], [0.0] * len(part))
            counts = [sum(samples_D[index].loss_mask_T) for index in part]
            pieces = self._passed(micro, adapter=False).cpu().split(counts)
            for index, piece in zip(part, pieces, strict=True):
                column_T = np.zeros(len(samples_D[index].token_ids_T), np.float32)
                column_T[np.flatnonzero(samples_D[index].loss_mask_T)] = piece.numpy()
                columns[index] = array(FLOATS, column_T.tobytes())
        return [columns[index] for index in range(len(samples_D))]

    # --- checkpoint ---

    def save_state(self, writer: StateWriter) -> None:
        self._let_be_read()
        file = build_state(self._masters, self._optimizer, {"updates": self._updates, "steps": self._steps})
        writer.write(PART, file.size, file.pieces)
        self._reader = writer

    def _let_be_read(self) -> None:
        """Before masters or moments change: what is written beside this step must be as it was."""
        if self._reader is not None:
            self._reader.wait()
            self._reader = None

    def load_state(self, parts: Mapping[str, Buffer]) -> None:
        self._let_be_read()
        counters = unpack_state(parts[PART], self._masters, self._optimizer)
        self._updates, self._steps = counters["updates"], counters["steps"]


def _routed_tokens(micro: MicroBatch) -> torch.Tensor | None:
    """Unpacked for one pass: of all of a step's samples at once they could be larger than the model."""
    routed = [unpack_experts(each.routed_experts) if each.routed_experts else None for each in micro.samples]
    return lay_out_experts(micro.branches, routed, micro.packed)


_DIVERGED_FIX = (
    "lower spec.training.learningRate, or set spec.training.maxGradNorm; the step's evidence is kept in the run folder"
)
