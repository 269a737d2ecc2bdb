"""The adapters that a run folder keeps, as its user names them: by step.

Belongs here: which there are. Does not belong here: reading one (`checkpoints.adapter_folder`), or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orbit_runtime.errors import UsageError
from orbit_runtime.loop.publish import ADAPTERS, adapter_name
from orbit_runtime.storage import Store, list_bundles


@dataclass(frozen=True)
class Kept:
    """An adapter, and the name that it has here."""

    name: str
    uri: str


def kept_steps(store: Store, steps: Sequence[int] | None, *, first: bool, option: str = "--steps") -> list[Kept]:
    """The adapters that a run kept, by step: those asked for, or all.

    Args:
        first: whether to include step 0 if no steps are given; its adapter is not the bare base.
        option: of the command line, that named the steps.

    Raises:
        UsageError: the folder holds no adapter, or lacks one that was asked for.
    """
    kept = sorted(int(name.rstrip("/").rpartition("policy-v")[2]) for name in list_bundles(store, ADAPTERS))
    if not kept:
        raise UsageError(
            "this folder holds no adapter", where=store.uri, fix="name the folder of a run that has started"
        )
    lacking = sorted({*(steps or ())} - {*kept})
    if lacking:
        raise UsageError(
            f"the run keeps no adapter of step {', '.join(map(str, lacking))}; it keeps: {', '.join(map(str, kept))}",
            where=f"{store.uri}, {option}",
            fix="choose from those; a larger spec.checkpoint.keep keeps more",
        )
    wanted = [step for step in kept if step or first] if steps is None else sorted({*steps})
    return [Kept(f"step-{step}", f"{store.uri}/{ADAPTERS}{adapter_name(step)}") for step in wanted]
