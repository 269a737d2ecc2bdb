"""Pipeline stages, each of which holds a run of layers: what they exchange, and in which order.

One forward, one backward (Narayanan et al., arXiv 2104.04473, section 2.2): a stage begins as many passes as there are
stages after it, then finishes one for each that it begins, so that it never holds the activations of more passes than
there are stages. Megatron-Core's schedule does the same, but it allocates on `cuda` by name and relies on models that
accept a hidden state as input; ours are transformers' models.

Legend: `T` this rank's tokens, `N` hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, distributed

from orbit_runtime.training.megatron.groups import Groups
from orbit_runtime.workers.ranks.rank import in_collective

Pass = TypeVar("Pass")
State = TypeVar("State")


@dataclass(frozen=True, slots=True, eq=False)
class ForwardHalf:
    """A pass between its forward and its backward half: the value to run backward from, and the input whose gradient
    the previous stage waits for."""

    root: Tensor
    entered: Tensor | None


class Pipeline:
    """This rank's stage and its neighbours. All stages get the same passes in the same order."""

    def __init__(self, groups: Groups, hidden_size: int, device: torch.device) -> None:
        self._forward, self._backward = groups.pipeline, groups.backward
        self.stage, self.stages = groups.pipeline.rank(), groups.pipeline.size()
        self._like = torch.empty(0, hidden_size, dtype=torch.float32, device=device)
        self._sent: deque[tuple[distributed.Work, Tensor]] = deque()
        self._entered: Tensor | None = None

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def receive(self, num_tokens: int) -> Tensor:
        """`[1, T, N]` from the previous stage, for the pass that begins now."""
        hidden_1TN = self._receive(self._like.new_empty(1, num_tokens, self._like.shape[1]), self._forward, -1)
        self._entered = hidden_1TN.requires_grad_() if torch.is_grad_enabled() else None
        return hidden_1TN

    def take_entered(self) -> Tensor | None:
        """The input of the newest pass, if it requires a gradient."""
        entered, self._entered = self._entered, None
        return entered

    def send(self, hidden_1TN: Tensor) -> None:
        """Sends to the next stage, asynchronously."""
        self._send(hidden_1TN.detach(), self._forward, 1)

    def receive_gradient(self, hidden_TN: Tensor) -> Tensor:
        return self._receive(torch.empty_like(hidden_TN), self._backward, 1)

    def send_gradient(self, gradient: Tensor) -> None:
        self._send(gradient, self._backward, -1)

    def run(self, passes: Iterable[Pass], begin: Callable[[Pass], State], finish: Callable[[State], None]) -> None:
        """Runs passes forward and backward, in this stage's order."""
        ahead = self.stages - 1 - self.stage
        begun: deque[State] = deque()
        for each in passes:
            begun.append(begin(each))
            if len(begun) > ahead:
                finish(begun.popleft())
        while begun:
            finish(begun.popleft())
        self.settle()

    def finish(self, begun: ForwardHalf) -> None:
        """The backward half of a pass."""
        gradient = None if self.is_last else self.receive_gradient(begun.root)
        if begun.root.requires_grad:
            begun.root.backward(gradient)
        if begun.entered is not None:
            assert begun.entered.grad is not None, "what entered a stage leaves it, changed or not"
            self.send_gradient(begun.entered.grad)

    def settle(self) -> None:
        """Waits until everything that was sent has been received."""
        self._wait(0)

    def _send(self, tensor: Tensor, group: distributed.ProcessGroup, step: int) -> None:
        # A stage that is far ahead waits for its neighbour, which bounds the number of messages in flight.
        self._wait(self.stages)
        tensor = tensor.contiguous()
        work = distributed.isend(tensor, group=group, group_dst=self.stage + step)
        assert work is not None
        self._sent.append((work, tensor))

    def _wait(self, left: int) -> None:
        with in_collective("pipeline"):
            while len(self._sent) > left:
                self._sent.popleft()[0].wait()

    def _receive(self, into: Tensor, group: distributed.ProcessGroup, step: int) -> Tensor:
        with in_collective("pipeline"):
            distributed.recv(into, group=group, group_src=self.stage + step)
        return into
