"""Beginning a run with an adapter from another training: `spec.adapter.initFrom`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orbit_runtime.adapters.files import files_digest
from orbit_runtime.checkpoints.adapter_folder import AdapterFolder, find_adapter
from orbit_runtime.errors import ModelError
from orbit_runtime.loop.state import RunState
from orbit_runtime.sides.inputs import WEIGHTS
from orbit_runtime.spec.adapter import Adapter
from orbit_runtime.spec.run import RunSpec

if TYPE_CHECKING:
    from orbit_runtime.loop.parts import RunParts

FIELD = "spec.adapter.initFrom"
CONTENT = "content.adapter"
"""Name of the adapter's digest among the digests of what a run reads."""


@dataclass(frozen=True)
class InitialAdapter:
    """The adapter, as read at the start."""

    folder: AdapterFolder
    digest: str
    """Digest of the adapter's files."""

    def to_json(self) -> dict[str, Any]:
        """The entry in `run.json`; a restart before the first checkpoint uses the same adapter."""
        return {"uri": self.folder.place, "digest": self.digest}


def open_initial(spec: RunSpec, before: Mapping[str, Any] | None) -> InitialAdapter | None:
    """The adapter to begin with; None if the run begins with one that changes nothing.

    Args:
        before: this run's own `run.json`, if it was started before.

    Raises:
        ModelError: (66) there is no adapter, Orbit does not compute with its kind, or it is not the one that
            `spec.adapter` describes.
    """
    asked = spec.adapter.init_from
    if asked is None:
        return None
    known = ((before or {}).get("initial") or {}).get("uri")
    folder = find_adapter(known or asked)
    if folder is None:
        raise ModelError(
            "there is no adapter here",
            where=f"{FIELD}: {asked}",
            fix="name a run folder with adapters, or the folder of one, such as runs/<run>/adapters/policy-v40",
        )
    check_adapter(spec.adapter, folder)
    return InitialAdapter(folder, files_digest(folder.files))


def initial_digest(initial: InitialAdapter | None, before: Mapping[str, Any] | None) -> dict[str, str]:
    """Name → digest, for the run's identity; without an adapter now, the digest that the first start recorded."""
    if initial is not None:
        return {CONTENT: initial.digest}
    known = (before or {}).get("identity", {}).get(CONTENT)
    return {} if known is None else {CONTENT: str(known)}


def check_adapter(adapter: Adapter, folder: AdapterFolder) -> None:
    """Raises ModelError (66) if `spec.adapter` does not describe this adapter."""
    wanted: dict[str, Any] = {"type": adapter.type}
    found: dict[str, Any] = {"type": folder.type}
    if adapter.lora is not None and folder.type == "LoRA":
        lora = adapter.lora
        root = lora.rank**0.5 if lora.rslora else lora.rank
        wanted |= {"lora.rank": lora.rank, "scaling": lora.alpha / root}
        found |= {"lora.rank": folder.rank, "scaling": folder.scaling}
    if adapter.oft is not None and folder.type == "OFT":
        wanted |= {"oft.blockSize": adapter.oft.block_size, "oft.parametrization": adapter.oft.parametrization}
        found |= {"oft.blockSize": folder.rank, "oft.parametrization": folder.parametrization}
        if {folder.parametrization, adapter.oft.parametrization} == {"CayleyNeumann"}:
            wanted["oft.neumannTerms"] = adapter.oft.neumann_terms
            found["oft.neumannTerms"] = folder.neumann_terms
    differ = [f"{name} {found[name]}, this run's is {wanted[name]}" for name in wanted if found[name] != wanted[name]]
    if differ:
        raise ModelError(
            f"the adapter {folder.place} does not match spec.adapter: {'; '.join(differ)}",
            where=FIELD,
            fix="write the `spec.adapter` of the run that made it",
        )


def begin_with(parts: RunParts, state: RunState, initial: InitialAdapter) -> None:
    """Gives the adapter to the trainer, before its first step.

    Raises:
        ModelError: (66) it belongs to another base, or its tensors are not those of this run's adapter.
    """
    initial.folder.check_base(
        parts.content[WEIGHTS],
        who=f"the adapter {initial.folder.place}",
        ours="this run's is",
        where=FIELD,
        fix="write the model and precision that it was trained on, or take an adapter of this base",
    )
    if initial.folder.base_weights is None:
        state.warn(f"{FIELD}: the adapter does not record its base; only its shapes were compared")
    parts.side.begin(initial.folder, initial.digest)
    why = f" ({initial.folder.chosen})" if initial.folder.chosen else ""
    parts.show.note(f"beginning with the adapter {initial.folder.place}{why}")
