"""A teacher: the policy's base with no adapter, with another adapter, or with an earlier state of the policy's adapter;
or servers, which reported the likeliest tokens as the rollouts ended.

Legend: `R` trained tokens of a micro-batch, `N` hidden size.
"""

from __future__ import annotations

from collections.abc import Buffer

import torch
from torch import Tensor

from orbit_runtime.adapters.inject import add_masters
from orbit_runtime.adapters.masters import Masters
from orbit_runtime.adapters.tensorfile import TensorFile
from orbit_runtime.policy.distance import TeacherReport
from orbit_runtime.policy.model import Policy
from orbit_runtime.training.micro_batches import MicroBatch
from orbit_runtime.training.settings import TeacherSettings
from orbit_runtime.training.state import build_state, unpack_state
from orbit_runtime.types import TEACHER_SLOT, Sampling


class Teacher:
    """A teacher on the policy's base. It uses no dropout, and its tokens go to the same experts as the policy's."""

    def __init__(self, policy: Policy, settings: TeacherSettings) -> None:
        """A previously trained adapter is already in its slot (`adapters.foreign.load_foreign`)."""
        self._policy = policy
        self._settings = settings
        self._slot = None if settings.type in ("Base", "Served") else TEACHER_SLOT
        self._masters: Masters | None = None
        if settings.type in ("Average", "Lagged"):
            self._masters = add_masters(policy.injected, TEACHER_SLOT, policy.injected.config, seed=0)
            self._blend(0.0)

    @property
    def compares(self) -> bool:
        """Whether training passes compare whole distributions."""
        return self._settings.measure is not None

    def outputs(self, micro: MicroBatch, routed_TLC: Tensor | None) -> Tensor | TeacherReport:
        """The teacher's view of the trained tokens: hidden states `[R, N]`, without gradient, or
        the servers' report.
        """
        if self._settings.type == "Served":
            return micro.teacher_report()
        with torch.no_grad(), self._policy.injected.selection.use(self._slot):
            return self._policy.target_hidden(micro.packed, routed_TLC)[micro.trained_R]

    def distances(self, hidden_RN: Tensor, micro: MicroBatch, outputs: Tensor | TeacherReport) -> Tensor:
        """fp32 `[R]`: distances of the policy from what `outputs` returned, with their gradient.

        Args: hidden_RN: the policy's, of all targets of the micro-batch that this process computes.
        """
        assert self._settings.measure is not None
        return self._policy.distances_of(hidden_RN, micro.packed, micro.trained_R, outputs, self._settings.measure)

    def logprobs(self, micro: MicroBatch, sampling: Sampling, routed_TLC: Tensor | None) -> Tensor:
        """fp32 `[R]` of the sampled tokens, as `sampling` draws them."""
        policy = self._policy
        with torch.no_grad(), policy.injected.selection.use(self._slot):
            all_R, _ = policy.logprobs(micro.packed, sampling=sampling, seen=micro.seen, routed_TLC=routed_TLC)
        return all_R[micro.trained_R]

    # --- teachers made from the policy ---

    def follow(self, steps: int) -> None:
        """Call after `steps` steps of the run: an average moves, a lagging teacher copies the policy when due."""
        if self._settings.type == "Average":
            assert self._settings.decay is not None
            self._blend(self._settings.decay)
        elif self._settings.type == "Lagged":
            assert self._settings.every_steps is not None
            if steps % self._settings.every_steps == 0:
                self._blend(0.0)

    def _blend(self, decay: float) -> None:
        """Averages OFT's parameters and builds the rotation from the average: a mean of rotations is not a rotation."""
        assert self._masters is not None
        own = self._policy.injected.masters.parameters
        with torch.no_grad():
            for name, parameter in self._masters.parameters.items():
                if decay:
                    parameter.lerp_(own[name], 1.0 - decay)
                else:
                    parameter.copy_(own[name])

    def state(self) -> TensorFile | None:
        """State for the checkpoint; None if the manifest determines the teacher completely."""
        return None if self._masters is None else build_state(self._masters.parameters, None, {"updates": 0})

    def restore(self, data: Buffer | None) -> None:
        """Args: data: None if the checkpoint has none; the teacher is then the restored policy."""
        if self._masters is None:
            return
        if data is None:
            self._blend(0.0)
        else:
            unpack_state(data, self._masters.parameters, None)
