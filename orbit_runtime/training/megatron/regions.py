"""Enters and leaves divided layers: the input is complete on every rank, the output is a sum over ranks.

Inside, ranks compute with their part of the matrices or experts and exchange nothing. Each rank's gradient of the
input is one term of a sum, and so is its gradient of every parameter that all ranks hold (`gradients`).

With sequence parallelism (Korthikanti et al., arXiv 2205.05198, section 4.2.2) a rank holds only its run of the tokens
outside these regions: entering gathers the tokens, leaving sums and scatters them. What was gathered is not kept for
the backward pass, which gathers it again (section 4.3 there).

If experts are divided among more ranks than the matrices are, the tokens of all those ranks are combined: entering
gathers them too, and leaving returns each rank its own.

With context parallelism ranks divide the tokens themselves: only keys and values are gathered, for attention (Llama 3,
arXiv 2407.21783, section 3.3.2).

After the last layer a rank computes the log-probs of its own tokens; these are then shared among all ranks.

Belongs here: the collectives around a layer, by Megatron-Core's mappings. Does not belong here: what is divided.

Legend: `T` tokens, `N` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from orbit_runtime.errors import InternalError, UnsupportedError
from orbit_runtime.policy.packed import PackedBatch
from orbit_runtime.training.megatron.groups import Groups
from orbit_runtime.training.megatron.pipeline import Pipeline
from orbit_runtime.workers.ranks.rank import note

Change = Callable[[Tensor], Tensor]


class Regions:
    """The regions of one model on one rank, a `Division`. `num_tokens` refers to the current pass: with context
    parallelism it counts this rank's tokens, before sequence parallelism splits them."""

    def __init__(self, groups: Groups, pipeline: Pipeline | None = None) -> None:
        self.groups = groups
        self.context = (groups.context.rank(), groups.context.size())
        self._pipeline = pipeline
        self._layers: Sequence[nn.Module] = ()
        self._open: _Gathered | None = None
        """Tokens gathered by the region that was entered last, if the backward pass is to gather them again."""
        self.num_tokens = 0
        self._counts: list[int] = []
        """Token counts of the current pass, for each rank in `groups.tokens`."""

    def install(self, model: nn.Module) -> None:
        """Wraps attention and feed-forward part of every decoder layer on this rank, and hooks before the first layer
        and after the last."""
        decoder = getattr(model, model.base_model_prefix)  # type: ignore[arg-type]
        self._layers = decoder.layers
        for layer in decoder.layers:
            if hasattr(layer, "self_attn"):
                _surround(layer.self_attn, self.enter, self.leave)
                has_experts = hasattr(layer.mlp, "experts")
                if has_experts and self.groups.sizes.expert % self.groups.sizes.tensor:
                    raise UnsupportedError(
                        f"experts are not divided, matrices are among {self.groups.sizes.tensor} GPUs",
                        where="spec.training.parallel.expert",
                        fix=f"write a multiple of {self.groups.sizes.tensor}",
                    )
                if hasattr(layer.mlp, "shared_experts"):
                    _surround(layer.mlp.shared_experts, self.own_tokens, self.among_all)
                _surround(
                    layer.mlp, *((self.enter_experts, self.leave_experts) if has_experts else (self.enter, self.leave))
                )
        decoder.register_forward_pre_hook(
            lambda _, __, given: self.begin(given["input_ids"].shape[1]), with_kwargs=True
        )
        decoder.embed_tokens.register_forward_hook(lambda _, __, hidden: self._before_layers(hidden))
        decoder.norm.register_forward_hook(lambda _, __, hidden: self._behind_layers(hidden))

    def _before_layers(self, embedded_1TN: Tensor) -> Tensor:
        """Args: embedded_1TN: in all stages but the first, the token ids, which were not looked up."""
        parts = self.groups.tensor.size() if self.groups.sizes.sequence_parallel else 1
        if self._pipeline is not None and not self._pipeline.is_first:
            return self._pipeline.receive(-(-self.num_tokens // parts))
        return embedded_1TN if parts == 1 else self.scatter(embedded_1TN)

    def _behind_layers(self, hidden_1TN: Tensor) -> Tensor:
        """This rank's tokens remain: the last stage computes their log-probs, other stages send them on."""
        if self._pipeline is not None and not self._pipeline.is_last:
            self._pipeline.send(hidden_1TN)
        return hidden_1TN

    def begin(self, num_tokens: int) -> None:
        """Begins a pass over `num_tokens` tokens."""
        self.num_tokens = num_tokens
        group = self.groups.tokens
        self._counts = [num_tokens]
        if group.size() > 1:
            # As Megatron-Core does: NCCL sums only tensors on its device.
            counts = torch.zeros(group.size(), dtype=torch.long, device=torch.cuda.current_device())
            counts[group.rank()] = num_tokens
            distributed.all_reduce(counts, group=group)
            self._counts = counts.tolist()

    def remembered(self) -> Callable[[], AbstractContextManager[None]]:
        return partial(self._again, self.num_tokens, self._counts)

    @contextmanager
    def _again(self, num_tokens: int, counts: list[int]) -> Iterator[None]:
        before = (self.num_tokens, self._counts)
        self.num_tokens, self._counts = num_tokens, counts
        try:
            yield
        finally:
            self.num_tokens, self._counts = before

    # --- context parallelism ---

    def meet_tokens(self, own_TN: Tensor) -> Tensor:
        return _Met.apply(own_TN, self.groups.context)  # type: ignore[no-any-return]

    # --- log-probs ---

    def own_targets(self, batch: PackedBatch) -> tuple[Tensor, Tensor] | None:
        """The output layer is the largest of all: a rank applies it to its own tokens, and nothing is gathered."""
        parts = self.groups.tensor.size() if self.groups.sizes.sequence_parallel else 1
        if parts == 1 and batch.places_T is None:
            return None
        place_R, is_own_R = batch.target_source_R, torch.ones_like(batch.target_source_R, dtype=torch.bool)
        if batch.places_T is not None:
            local_T = place_R.new_full((batch.num_tokens,), -1)
            local_T[batch.places_T] = torch.arange(len(batch.places_T), device=place_R.device)
            place_R = local_T[place_R]
            is_own_R = place_R >= 0
        if parts > 1:
            size = -(-len(batch.token_ids_T) // parts)
            place_R = place_R - self.groups.tensor.rank() * size
            is_own_R &= (place_R >= 0) & (place_R < size)
        index_R = is_own_R.nonzero()[:, 0]
        return index_R, place_R[index_R]

    def join_targets(self, own_XR: Tensor, index_R: Tensor, count: int) -> Tensor:
        groups = [self.groups.tensor] if self.groups.sizes.sequence_parallel else []
        if self.context[1] > 1:
            groups.append(self.groups.context)
        return _JoinTargets.apply(own_XR, index_R, count, groups)  # type: ignore[no-any-return]

    # --- matrices ---

    def enter(self, hidden_1TN: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        group = self.groups.tensor
        if group.size() == 1:
            return hidden_1TN
        if not self.groups.sizes.sequence_parallel:
            return mappings.copy_to_tensor_model_parallel_region(hidden_1TN, group)  # type: ignore[no-any-return]
        whole = mappings.gather_from_sequence_parallel_region(hidden_1TN[0], group=group)
        self._open = _Gathered(whole, hidden_1TN[0], group) if self._gathers_again() else None
        return whole[None, : self.num_tokens]  # type: ignore[no-any-return]

    def _gathers_again(self) -> bool:
        """Whether the backward pass gathers again; not if the layer's whole forward pass is repeated, which gathers as
        well.
        """
        is_repeated = any(getattr(layer, "gradient_checkpointing", False) for layer in self._layers)
        return torch.is_grad_enabled() and not is_repeated

    def leave(self, partial_1TN: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        group = self.groups.tensor
        if group.size() == 1:
            return partial_1TN
        if not self.groups.sizes.sequence_parallel:
            return mappings.reduce_from_tensor_model_parallel_region(partial_1TN, group)  # type: ignore[no-any-return]
        padded = self._padded(partial_1TN[0])
        own_1TN = mappings.reduce_scatter_to_sequence_parallel_region(padded, group=group)[None]
        gathered, self._open = self._open, None
        if gathered is None:
            return own_1TN  # type: ignore[no-any-return]
        return _GatherAgain.apply(own_1TN, gathered.own_TN, gathered)  # type: ignore[no-any-return]

    # --- experts ---

    def enter_experts(self, hidden_1TN: Tensor) -> Tensor:
        own = self.enter(hidden_1TN)
        if len(self._counts) == 1:
            return own
        # Nothing but the exchange reads what was gathered, and it keeps nothing of it.
        self._open = None
        return _Exchange.apply(own[0], self._counts, self.groups.tokens)[None]  # type: ignore[no-any-return]

    def leave_experts(self, partial_1TN: Tensor) -> Tensor:
        if len(self._counts) > 1:
            partial_1TN = _Return.apply(partial_1TN[0], self._counts, self.groups.tokens)[None]
        return self.leave(partial_1TN)

    def own_tokens(self, all_1TN: Tensor) -> Tensor:
        """Shared experts are not assigned to ranks: each rank computes them for its own tokens."""
        return all_1TN if len(self._counts) == 1 else all_1TN.split(self._counts, dim=1)[self.groups.tokens.rank()]

    def among_all(self, own_1TN: Tensor) -> Tensor:
        before = sum(self._counts[: self.groups.tokens.rank()])
        after = sum(self._counts) - before - own_1TN.shape[1]
        return own_1TN if len(self._counts) == 1 else nn.functional.pad(own_1TN, (0, 0, before, after))

    def meet(self, own_TC: Tensor) -> Tensor:
        """Experts given for this rank's tokens → those for all tokens that its routers see."""
        return own_TC if len(self._counts) == 1 else _gathered(own_TC, self._counts, self.groups.tokens)

    def own(self, all_TC: Tensor) -> Tensor:
        return all_TC if len(self._counts) == 1 else all_TC.split(self._counts)[self.groups.tokens.rank()]

    # --- sequence parallelism ---

    def scatter(self, hidden_1TN: Tensor) -> Tensor:
        """All tokens → this rank's run of them; the last run is padded."""
        from megatron.core.tensor_parallel import mappings

        own_TN = mappings.scatter_to_sequence_parallel_region(self._padded(hidden_1TN[0]), group=self.groups.tensor)
        # A copy: Megatron-Core's run of tokens is a view, and the first layer would keep all of them for backward.
        return own_TN.clone()[None]  # type: ignore[no-any-return]

    def _padded(self, tokens_TN: Tensor) -> Tensor:
        if len(tokens_TN) != self.num_tokens:
            raise InternalError(f"a layer gave {len(tokens_TN)} tokens, the pass has {self.num_tokens}")
        missing = -len(tokens_TN) % self.groups.tensor.size()
        return nn.functional.pad(tokens_TN, (0, 0, 0, missing)) if missing else tokens_TN


def _gathered(own_TN: Tensor, counts: list[int], group: distributed.ProcessGroup) -> Tensor:
    most = max(counts)
    padded = nn.functional.pad(own_TN, (0, 0, 0, most - len(own_TN))).contiguous()
    parts = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _returned(all_TN: Tensor, counts: list[int], group: distributed.ProcessGroup) -> Tensor:
    """This rank's run of the sums over ranks, added in rank order."""
    most, runs = max(counts), all_TN.split(counts)
    padded = [nn.functional.pad(run, (0, 0, 0, most - len(run))).contiguous() for run in runs]
    own = torch.empty_like(padded[0])
    distributed.reduce_scatter(own, padded, group=group)
    return own[: counts[group.rank()]]


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all tokens in order, from the two runs that each rank holds (`policy.packed.own_tokens`)."""
    halves = [part.chunk(2) for part in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)])


def _runs(all_TN: Tensor, count: int) -> list[Tensor]:
    """The inverse of `in_order`."""
    runs = all_TN.chunk(2 * count)
    return [torch.cat((runs[place], runs[-1 - place])) for place in range(count)]


def _all_tokens(own_TN: Tensor, group: distributed.ProcessGroup) -> Tensor:
    own_TN = own_TN.contiguous()
    parts = [torch.empty_like(own_TN) for _ in range(group.size())]
    distributed.all_gather(parts, own_TN, group=group)
    return in_order(parts)


class _Gathered:
    """Memory with all ranks' tokens, which is given back after the forward pass and filled again for the backward
    pass. Whatever autograd has saved of it lies in that memory."""

    def __init__(self, whole_TN: Tensor, own_TN: Tensor, group: distributed.ProcessGroup) -> None:
        # Without the version that autograd checks: the values that come back are the same.
        self._whole_TN, self._group = whole_TN.data, group
        self.own_TN = own_TN.detach()
        self._num_bytes = whole_TN.untyped_storage().nbytes()

    def release(self) -> None:
        self._whole_TN.untyped_storage().resize_(0)

    def refill(self, own_TN: Tensor) -> None:
        self._whole_TN.untyped_storage().resize_(self._num_bytes)
        distributed.all_gather_into_tensor(self._whole_TN, own_TN.contiguous(), group=self._group)


class _GatherAgain(torch.autograd.Function):
    """Behind a region: the end of its forward pass, and the beginning of its backward pass."""

    @staticmethod
    def forward(ctx: Any, left_1TN: Tensor, entered_TN: Tensor, gathered: _Gathered) -> Tensor:
        ctx.gathered = gathered
        ctx.save_for_backward(entered_TN)
        gathered.release()
        return left_1TN.view_as(left_1TN)

    @staticmethod
    def backward(ctx: Any, grad_1TN: Tensor) -> tuple[Tensor, None, None]:
        ctx.gathered.refill(*ctx.saved_tensors)
        return grad_1TN, None, None


class _Met(torch.autograd.Function):
    """This rank's tokens → all tokens. Each rank uses them for its own tokens, so backward sums the gradients."""

    @staticmethod
    def forward(ctx: Any, own_TN: Tensor, group: distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_tokens(own_TN, group)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor, None]:
        parts = _runs(grad_TN, ctx.group.size())
        own = torch.empty_like(parts[0])
        distributed.reduce_scatter(own, parts, group=ctx.group)
        return own, None


class _JoinTargets(torch.autograd.Function):
    """Values of this rank's targets → of all targets. Each comes from one rank, so a sum with zeros is exact. Every
    rank computes the rest identically, so each already has the whole gradient of its own values."""

    @staticmethod
    def forward(
        ctx: Any, own_XR: Tensor, index_R: Tensor, count: int, groups: Sequence[distributed.ProcessGroup]
    ) -> Tensor:
        ctx.save_for_backward(index_R)
        joined = own_XR.new_zeros(len(own_XR), count).index_copy_(1, index_R, own_XR)
        for group in groups:
            distributed.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, grad_XR: Tensor) -> tuple[Tensor, None, None, None]:
        (index_R,) = ctx.saved_tensors
        return grad_XR[:, index_R], None, None, None


class _Exchange(torch.autograd.Function):
    """This rank's tokens → those of all ranks of the group; backward sums the gradients from all ranks."""

    @staticmethod
    def forward(ctx: Any, own_TN: Tensor, counts: list[int], group: distributed.ProcessGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _gathered(own_TN, counts, group)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor, None, None]:
        return _returned(grad_TN, ctx.counts, ctx.group), None, None


class _Return(torch.autograd.Function):
    """The inverse of `_Exchange`."""

    @staticmethod
    def forward(ctx: Any, all_TN: Tensor, counts: list[int], group: distributed.ProcessGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _returned(all_TN, counts, group)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad_TN, ctx.counts, ctx.group), None, None


def _surround(module: nn.Module, enter: Change, leave: Change) -> None:
    """The hidden state is the first argument or `hidden_states`, and the first of several results.

    A pass over a long sequence takes minutes, so reaching a module is reported as progress, in both directions.
    """

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        note()
        if args:
            return (enter(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"])}

    def after(_: nn.Module, __: Any, result: Any) -> Any:
        left = leave(result[0] if isinstance(result, tuple) else result)
        if left.requires_grad:
            left.register_hook(lambda _: note())
        return (left, *result[1:]) if isinstance(result, tuple) else left

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
