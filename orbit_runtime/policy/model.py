"""`Policy`: one frozen base, its injected adapters, and the two operations that training needs.

Belongs here: forward passes over packed batches, log-probs with an adapter on or off, digests of the base, and the
interface to the processes that hold the rest of the model.
Does not belong here: reading checkpoints (`load`), decoding (`rollout`).

Legend: `T` packed tokens, `R` targets, `N` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn

from orbit_runtime.adapters.inject import InjectedAdapter
from orbit_runtime.adapters.layer import AppliedTensors
from orbit_runtime.adapters.masters import Trainable
from orbit_runtime.digests import PIECE_BYTES, PieceHasher, tree_digest
from orbit_runtime.policy.attention import PACKED, AttentionPlan, Kernel, Mode, hidden_of, layers_of, run_decoder
from orbit_runtime.policy.direct import DirectDecoder
from orbit_runtime.policy.distance import Measure, TeacherReport, token_distances
from orbit_runtime.policy.logprobs import UNSHAPED, head_gives_same_bits, logits_of, token_logprobs, token_scores
from orbit_runtime.policy.packed import Branch, PackedBatch, PackedPlan, ProcessIndex, build_packed, gather_rows
from orbit_runtime.policy.preceding_tokens import PrecedingTokens
from orbit_runtime.policy.recompute import Recompute, recompute_layers
from orbit_runtime.policy.routing import Routing
from orbit_runtime.policy.whole_rows import OwnPrefill, OwnRows, OwnStep, WholeRows
from orbit_runtime.quant.linear import FrozenLinear
from orbit_runtime.types import Sampling


class Division(Protocol):
    """One of several processes that compute a pass together."""

    context: ProcessIndex
    """ProcessIndex among the processes that divide a pass's tokens."""

    def meet_tokens(self, own_TN: torch.Tensor) -> torch.Tensor:
        """Rows of this process's tokens → rows of all tokens. Backward sums every process's gradient for each row."""

    def own_targets(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `PackedBatch`."""

    def join_targets(self, own_XR: torch.Tensor, index_R: torch.Tensor, count: int) -> torch.Tensor:
        """`[X, count]` from each process's values for its own targets. Backward returns each process its own."""

    def remembered(self) -> Callable[[], AbstractContextManager[None]]:
        """A context that restores the state of the current pass, for a layer that is recomputed later."""


@dataclass(frozen=True)
class Policy:
    """A causal LM whose linears are frozen and, where targeted, adapted.

    The trainer and the torch engine hold the same `Policy`, hence one base; `injected.selection` chooses which adapter
    a pass applies.
    """

    model: nn.Module
    """The transformers `…ForCausalLM`."""
    injected: InjectedAdapter
    device: torch.device
    compute_dtype: torch.dtype
    vocabulary: int
    precision: str
    """Format of the checkpoint's quantised layers: a name in `quant.FORMATS`."""
    kernel: Kernel = "SDPA"
    direct: DirectDecoder | None = None
    """Orbit's own implementation of the base, if its form is known; None to use the model's modules."""
    mode: Mode = PACKED
    whole: Trainable | None = None
    """The masters, if every weight is trained; None if `injected` has the trained parameters."""
    routing: Routing | None = None
    """Routing of its routed experts; None if it has none, or none that can be given another choice."""
    division: Division | None = None
    """The processes that hold the model together; None if this one holds all of it."""
    checkpoint_name: Callable[[str], str] = str
    """Name of a tensor of `model` → its name in the checkpoint."""

    def sampled_hidden(
        self,
        token_ids_T: torch.Tensor,
        position_T: torch.Tensor,
        plan: AttentionPlan | OwnRows | WholeRows | OwnPrefill | OwnStep,
    ) -> torch.Tensor:
        """Last hidden states `[T, N]` for the tokens of an engine's pass, one query each; not for gradients."""
        if isinstance(plan, OwnRows | WholeRows | OwnPrefill | OwnStep):
            return plan.hidden(self._decode_rows, self.injected.selection)
        if self.direct is not None:
            return self.direct.hidden(token_ids_T, position_T, plan)
        return self.hidden(token_ids_T.view(plan.layout), position_T.view(plan.layout), plan).flatten(0, 1)

    def _decode_rows(self, token_BS: torch.Tensor, position_BS: torch.Tensor, **cached: Any) -> torch.Tensor:
        return run_decoder(self.model, token_BS, position_BS, **cached)

    def hidden(self, token_ids_BQ: torch.Tensor, position_BQ: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Last hidden states `[B, Q, N]`, after the final norm."""
        return hidden_of(self.model, token_ids_BQ, position_BQ, plan)

    def head(self, hidden_RN: torch.Tensor) -> torch.Tensor:
        """Logits `[R, V]`, as `logprobs.logits_of`, scaled and capped as the model's are."""
        return self.mode.shaped(logits_of(self.model.get_output_embeddings(), hidden_RN))

    def pack(self, branches: Sequence[Branch]) -> PackedBatch:
        if self.division is None:
            return build_packed(branches, self.device)
        batch = build_packed(branches, self.device, self.division.context)
        return replace(batch, own_targets=self.division.own_targets(batch))

    def plan(self, batch: PackedBatch) -> PackedPlan:
        divided = self.division is not None and self.division.context[1] > 1
        meet = self.division.meet_tokens if divided else None  # type: ignore[union-attr]
        return PackedPlan(batch, self.kernel, meet=meet, is_alone=self.division is None)

    def logprobs(
        self,
        batch: PackedBatch,
        *,
        sampling: Sampling = UNSHAPED,
        seen: PrecedingTokens | None = None,
        routed_TLC: torch.Tensor | None = None,
        directly: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 `(logprobs [R], entropies [R])` of the batch's targets under the selected adapter, as `sampling` draws.

        Args:
            seen: of the same branches; required if `sampling` penalises repetition.
            routed_TLC: experts that the tokens are sent to (`lay_out_experts`); None if the routers choose.
            directly: by `direct` where there is one, whose bits are not those of the trainer's passes.
        """
        hidden_RN = self.target_hidden(batch, routed_TLC, directly)
        return self.logprobs_of(hidden_RN, batch, sampling=sampling, seen=seen)

    def logprobs_of(
        self,
        hidden_RN: torch.Tensor,
        batch: PackedBatch,
        *,
        sampling: Sampling = UNSHAPED,
        seen: PrecedingTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`logprobs` from `target_hidden` of the same batch."""
        targets_R = batch.target_ids_R
        if batch.own_targets is not None:
            index_R, _ = batch.own_targets
            targets_R, seen = targets_R[index_R], None if seen is None else seen.of_targets(index_R)
        found = token_logprobs(
            hidden_RN,
            targets_R,
            self.head,
            vocabulary=self.vocabulary,
            sampling=sampling,
            seen=seen,
            weights=[] if self.whole is None else [*self.model.get_output_embeddings().parameters()],
        )
        return self._joined(batch, found)

    def distances_of(
        self,
        hidden_RN: torch.Tensor,
        batch: PackedBatch,
        trained_R: torch.Tensor,
        teacher: torch.Tensor | TeacherReport,
        measure: Measure,
    ) -> torch.Tensor:
        """fp32 distances of these of the batch's targets from a teacher, from `target_hidden` of the same batch.

        Args:
            trained_R: indices of targets, in ascending order.
            teacher: of these targets, in this order: the teacher's hidden states, or its report. In a divided pass only
                the latter: other processes' hidden states are not here.
        """
        if batch.own_targets is None or self.division is None:
            return token_distances(hidden_RN[trained_R], teacher, self.head, measure, vocabulary=self.vocabulary)
        assert isinstance(teacher, TeacherReport)
        is_trained_R, own_R = _own_trained(batch, trained_R)
        found_R = token_distances(
            hidden_RN[is_trained_R], teacher[own_R], self.head, measure, vocabulary=self.vocabulary
        )
        return self.division.join_targets(found_R[None], own_R, len(trained_R))[0]

    def values_of(
        self,
        hidden_RN: torch.Tensor,
        batch: PackedBatch,
        trained_R: torch.Tensor,
        read: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """`read` applied to the hidden states of these of the batch's targets, from `target_hidden` of the same batch.

        Args:
            trained_R: indices of targets, in ascending order.
            read: hidden states `[., N]` → one number each.
        """
        if batch.own_targets is None or self.division is None:
            return read(hidden_RN[trained_R])
        is_trained_R, own_R = _own_trained(batch, trained_R)
        return self.division.join_targets(read(hidden_RN[is_trained_R])[None], own_R, len(trained_R))[0]

    def scores(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """`(logprobs [R] fp32, most probable tokens [R] int64)` at the batch's targets; no gradients."""
        own = batch.own_targets
        targets_R = batch.target_ids_R if own is None else batch.target_ids_R[own[0]]
        logprobs_R, top_R = token_scores(self.target_hidden(batch), targets_R, self.head, vocabulary=self.vocabulary)
        # Integers up to 2^24 are exact in fp32.
        logprobs_R, number_R = self._joined(batch, (logprobs_R, top_R.float()))
        return logprobs_R, number_R.long()

    def target_hidden(
        self, batch: PackedBatch, routed_TLC: torch.Tensor | None = None, directly: bool = False
    ) -> torch.Tensor:
        """Last hidden states `[R, N]` at the positions that predict the batch's targets, with gradient to the adapter;
        in a divided pass, for this process's targets only."""
        source_R = batch.target_source_R if batch.own_targets is None else batch.own_targets[1]
        return gather_rows(self.through(batch, routed_TLC, directly), source_R)

    def _joined(
        self, batch: PackedBatch, found: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values for all targets, from what this process computed for its own."""
        if batch.own_targets is None or self.division is None:
            return found
        first_R, second_R = self.division.join_targets(
            torch.stack(found), batch.own_targets[0], len(batch.target_ids_R)
        )
        return first_R, second_R

    def through(
        self, batch: PackedBatch, routed_TLC: torch.Tensor | None = None, directly: bool = False
    ) -> torch.Tensor:
        """Hidden states `[T, N]` of the batch's tokens after this process's last layer; in a divided pass, of its own
        tokens only."""
        if self.mode.rows != "packed":
            return OwnRows(batch, self.mode.rows == "single").hidden(self._decode_rows, self.injected.selection)
        plan = self.plan(batch)
        if self.direct is not None and (directly or self._passes_directly):
            return self.direct.hidden(batch.token_ids_T, batch.position_T, plan)
        with self.routing.given(routed_TLC) if self.routing else nullcontext():
            return self.hidden(batch.token_ids_T[None], batch.position_T[None], plan)[0]

    @property
    def gives_same_bits(self) -> bool:
        """Whether a token's log-prob has the same bits in the trainer and in a torch engine, both on this policy."""
        return (
            self.direct is not None
            and self._passes_directly
            and self.kernel == "SDPA"
            and self.direct.gives_same_bits
            and head_gives_same_bits(self.model.get_output_embeddings(), self.compute_dtype)
        )

    @property
    def _passes_directly(self) -> bool:
        """Whether the trainer's passes use `direct` too: those on a CPU. All of them or none, so that a pass without
        gradient has the bits of one with it."""
        config, selection = self.injected.config, self.injected.selection
        return (
            self.device.type == "cpu"
            and self.division is None
            and self.whole is None
            and (config.type == "LoRA" or (self.direct is not None and self.direct.gives_same_bits))
            and not config.dropout
            and not layers_of(self.model)[0].training
            and not (torch.is_grad_enabled() and isinstance(selection.active, tuple))
        )

    def recompute(self, recompute: Recompute) -> None:
        """Sets what passes that record gradients keep of each layer from now on. Results do not change, except in their
        last bits where `direct` makes the passes that keep everything.

        Raises:
            UnsupportedError: the model's layers cannot be recomputed.
        """
        states = (self.injected.selection, self.routing, self.division)
        recompute_layers(self.model, recompute, [state for state in states if state is not None])

    @contextmanager
    def traced(self, tell: Callable[[AppliedTensors], None] | None = None) -> Iterator[list[AppliedTensors]]:
        """Makes every adapted layer call `tell` with what it multiplies by, within this context; without `tell` that is
        collected.
        """
        selection, collected = self.injected.selection, list[AppliedTensors]()
        # Tells only of this thread's passes.
        with selection.turn:
            selection.trace, before = tell or collected.append, selection.trace
            try:
                yield collected
            finally:
                selection.trace = before

    def base_digest(self) -> str:
        """`tree:…` over every frozen tensor's name, dtype, shape and bytes, without adapters; see `digests`.

        Values that were only widened to the compute dtype count as BF16, so the digest does not depend on the device. A
        linear's dense copy counts only if it is not the packed tensors' any more.
        Packed bytes leave a GPU once, one piece at a time, and are hashed concurrently.
        """
        hasher, counts = PieceHasher(), {}
        for name, tensor in sorted(self._base_tensors().items()):
            values = tensor.detach().reshape(-1)
            dtype = torch.bfloat16 if _was_widened(values) else values.dtype
            parts = values.split(PIECE_BYTES // dtype.itemsize) if len(values) else ()
            for part in parts:
                hasher.add(part.to(dtype).cpu().view(torch.uint8).numpy())
            counts[f"{name} {dtype} {list(tensor.shape)}"] = len(parts)
        pieces = iter(hasher.result())
        return tree_digest({title: tuple(islice(pieces, count)) for title, count in counts.items()})

    def _base_tensors(self) -> dict[str, torch.Tensor]:
        tensors = dict(self.model.named_parameters())
        tensors.update(self.model.named_buffers())
        linears = [(name, each) for name, each in self.model.named_modules() if isinstance(each, FrozenLinear)]
        linears += self.direct.shared() if self.direct is not None else ()
        copies = ((f"{name}.dense", linear.changed_copy()) for name, linear in linears)
        tensors.update((name, copy) for name, copy in copies if copy is not None)
        seen: dict[int, str] = {}
        return {
            name: tensor
            for name, tensor in tensors.items()
            if not tensor.requires_grad and seen.setdefault(tensor.data_ptr(), name) == name
        }


def _own_trained(batch: PackedBatch, trained_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The trained targets of this process in a divided pass, and their indices in `trained_R`."""
    assert batch.own_targets is not None
    number_R = torch.full_like(batch.target_ids_R, -1)
    number_R[trained_R] = torch.arange(len(trained_R), device=trained_R.device)
    number_R = number_R[batch.own_targets[0]]
    is_trained_R = number_R >= 0
    return is_trained_R, number_R[is_trained_R]


def _was_widened(values: torch.Tensor) -> bool:
    """Whether these one-dimensional fp32 values are widened BF16 values."""
    if values.dtype is not torch.float32:
        return False
    return all(torch.equal(part.bfloat16().float(), part) for part in values.split(PIECE_BYTES // 4))
