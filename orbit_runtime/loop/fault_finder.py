"""Inspects both sides to find why they differ: the trainer's ranks, and the layers of every copy of the engine."""

from __future__ import annotations

from collections.abc import Buffer, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orbit_runtime.errors import OrbitError
from orbit_runtime.types import AdapterFiles, Engine

if TYPE_CHECKING:
    from orbit_runtime.parity.locate import InspectableCopy, Location
    from orbit_runtime.policy.snapshot import Snapshot

APART = (
    "which layer differs was not looked for, because trainer and engine are processes apart: `orbit parity` with this "
    "manifest compares their layers in one process"
)
COPIES = 3
"""Rows in the trainer's second snapshot: a different batch shape, to measure the trainer's noise floor."""


@dataclass(frozen=True)
class FaultFinder:
    """The two sides of a run, and the tokens used to compare them."""

    engine: Engine
    token_ids_T: tuple[int, ...]
    compute_dtype: str
    snapshot: Callable[..., Snapshot] | None = None
    """See `TrainerSide.snapshot`; None for a trainer in another process."""
    explain: Callable[[Mapping[str, Buffer]], str] | None = None
    """See `TrainerSide.explain`."""
    group: int | None = None
    """Columns of the packed base that share a scale."""

    def find(self, name: str, adapter: AdapterFiles) -> Location | None:
        """Finds the first layer where the two sides differ: with the bare base or, if that agrees, with the policy.

        None if no layers can be inspected: the trainer's, because it is another process, or those of any copy, for
        example because the engine computes with the trainer's own.

        Args:
            name: the adapter's name in the engine.
        """
        if self.snapshot is None:
            return None
        from orbit_runtime.parity.locate import InspectableCopy

        found = None
        for copy in self.engine.copies():
            if isinstance(copy, InspectableCopy) and copy.is_tapped:
                found = self._find_in(copy, name, adapter)
                if not found.is_clear:
                    break
        return found

    def explain_trainer(self, adapter: AdapterFiles) -> list[str]:
        """Describes how what the trainer applied differs from what was published, and on which rank."""
        how = "" if self.explain is None else self.explain(adapter.files)
        return [f"the trainer did not apply what was published: {how}"] if how else []

    def explain_layers(self, name: str, adapter: AdapterFiles) -> list[str]:
        """Describes where the two sides differ."""
        if self.snapshot is None:
            return [APART]
        try:
            location = self.find(name, adapter)
        except OrbitError as error:
            # A copy that has lost the adapter cannot be inspected with it. The proof has already reported that.
            return [f"layers could not be inspected: {error.message}"]
        return [f"the two sides differ {location.sentence()}"] if location and location.found else []

    def _find_in(self, copy: InspectableCopy, name: str, adapter: AdapterFiles) -> Location:
        from orbit_runtime.adapters.layer import TRAINER_SLOT
        from orbit_runtime.parity.locate import locate

        tokens, files = self.token_ids_T, adapter.files
        assert self.snapshot is not None
        for theirs_is, slot in ((None, None), (name, TRAINER_SLOT)):
            theirs = copy.snapshot(tokens, theirs_is)
            # Use the engine's routing if known: a token routed elsewhere by a hair's breadth is no layer's fault.
            routed = theirs.routed_TLC
            ours = self.snapshot(tokens, slot, files, routed_TLC=routed)
            again = self.snapshot(tokens, slot, files, copies=COPIES, routed_TLC=routed)
            found = locate(ours, again, theirs, dtype=self.compute_dtype, group=self.group)
            if not found.is_clear:
                break
        return found
