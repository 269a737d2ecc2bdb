"""The process groups of a rank, as Megatron-Core makes them.

Ranks are numbered in Megatron-Core's default order, tensor first: ranks that divide matrices are neighbours and so
share one node's fastest links. Experts are divided among neighbours as well, over all ranks of a stage.

Belongs here: group membership, and a rank's share of a model. Does not belong here: collectives
(`regions`, `gradients`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.policy.shares import Share


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """Number of ranks that divide each dimension; the remaining factor of `world` is the number of data-parallel
    replicas.

    Example: matrices and experts in two, on two ranks: `GroupSizes(world=2, tensor=2, expert=2)`.
    """

    world: int = 1
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    context: int = 1
    sequence_parallel: bool = False
    """Between the divided parts, each rank holds its run of the tokens; otherwise every rank holds all tokens."""

    @property
    def data(self) -> int:
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def token_sets(self) -> int:
        """Number of parts into which a stage's tokens are split among the ranks that divide the same experts."""
        return max(1, self.expert // self.tensor)

    def check(self) -> None:
        """
        Raises:
            UnsupportedError: the sizes do not multiply to the number of ranks, or experts are divided among only some
                of the ranks that divide matrices.
        """
        group = self.tensor * self.pipeline * self.context
        if self.world % group:
            raise UnsupportedError(
                f"tensor {self.tensor}, pipeline {self.pipeline} and context {self.context} need a multiple of {group} "
                f"GPUs, and there are {self.world}",
                where="spec.training.parallel",
                fix="write sizes whose product divides the number of GPUs",
            )
        if self.expert > 1 and (self.expert % self.tensor or (self.world // self.pipeline) % self.expert):
            raise UnsupportedError(
                f"experts are divided among {self.expert} GPUs, matrices among {self.tensor}",
                where="spec.training.parallel.expert",
                fix=f"write a multiple of {self.tensor} that divides {self.world // self.pipeline}, or 1",
            )


@dataclass(frozen=True, slots=True)
class Groups:
    """A rank's groups. In each, ranks are ordered by the parts they hold."""

    sizes: GroupSizes
    tensor: ProcessGroup
    expert: ProcessGroup
    """Ranks that divide the experts: the group `tensor`, together with neighbouring replicas or context parts."""
    tokens: ProcessGroup
    """Ranks of one `expert` group with the same place in `tensor` and different tokens."""
    pipeline: ProcessGroup
    """The stages, each of which holds a consecutive run of layers."""
    backward: ProcessGroup
    """The same ranks: gradients travel back while hidden states travel forward, and must not queue behind them."""
    context: ProcessGroup
    """Ranks that hold the same part of the matrices and divide the tokens of a pass."""
    data: ProcessGroup
    """Ranks that hold the same part of the matrices at the same place in `context`, and train on different samples."""
    replicas: ProcessGroup
    """Ranks that hold the same part of the matrices and train on different tokens: `data` and `context` together."""
    expert_replicas: ProcessGroup
    """Ranks that hold the same experts."""

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank() == self.pipeline.size() - 1  # type: ignore[no-any-return]

    @property
    def leads(self) -> bool:
        """Whether this rank reports what all ranks of its replica know, or what only the last stage knows."""
        return self.is_last_stage and self.context.rank() == 0  # type: ignore[no-any-return]

    def share(self) -> Share:
        tensor, expert, pipeline = ((group.rank(), group.size()) for group in (self.tensor, self.expert, self.pipeline))
        return Share(tensor, expert, pipeline)


def join(sizes: GroupSizes, rank: int, address: str, *, seconds: float, listener: int | None = None) -> Groups:
    """Meets the other ranks and makes the groups.

    Args:
        address: `host:port` of rank 0's store.
        seconds: maximum time that a collective waits for another rank.
        listener: in rank 0, the descriptor of a socket that already listens at the address.

    Raises:
        UnsupportedError: the sizes are inconsistent.
    """
    sizes.check()
    allow_cpu()
    parallel_state = _import_parallel_state()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=seconds)
    host, _, port = address.rpartition(":")
    store = distributed.TCPStore(
        host, int(port), sizes.world, is_master=rank == 0, timeout=timeout, master_listen_fd=listener
    )
    distributed.init_process_group(backend, store=store, rank=rank, world_size=sizes.world, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, int(seconds // 60)),
        create_gloo_process_groups=False,
    )
    return Groups(
        sizes,
        tensor=parallel_state.get_tensor_model_parallel_group(),
        expert=parallel_state.get_expert_model_parallel_group(),
        tokens=_token_group(sizes, rank),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        backward=_backward_group(sizes, rank),
        context=parallel_state.get_context_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        replicas=parallel_state.get_data_parallel_group(with_context_parallel=True),
        expert_replicas=parallel_state.get_expert_data_parallel_group(),
    )


def _import_parallel_state() -> Any:
    """Suppresses Megatron-Core's warnings about missing libraries and deprecated torch names: people read a rank's log
    when something is wrong."""
    warnings.filterwarnings("ignore", r"`torch\.distributed\..*` is deprecated", FutureWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import mappings  # noqa: F401
    return parallel_state


def leave() -> None:
    """Safe to call twice."""
    if distributed.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def _backward_group(sizes: GroupSizes, rank: int) -> ProcessGroup:
    """The neighbouring ranks of a pipeline are one stage's number of ranks apart. Every rank creates every group."""
    width = sizes.world // sizes.pipeline
    made = [distributed.new_group(list(range(place, sizes.world, width))) for place in range(width)]
    return made[rank % width]


def _token_group(sizes: GroupSizes, rank: int) -> ProcessGroup:
    """Megatron-Core has no name for this group. Every rank creates every group."""
    span, found = max(sizes.expert, sizes.tensor), None
    for first in range(0, sizes.world, span):
        for place in range(sizes.tensor):
            ranks = list(range(first + place, first + span, sizes.tensor))
            group = distributed.new_group(ranks)
            if rank in ranks:
                found = group
    assert found is not None
    return found


def allow_cpu() -> None:
    """Megatron-Core's collectives allocate on `torch.cuda.current_device()`: without CUDA, from now on and in this
    process, it returns the CPU. Nothing else in torch is touched.

    Call before Megatron-Core's first collective. Safe to call twice; does nothing if there is a CUDA device.
    """
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
