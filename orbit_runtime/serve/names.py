"""Model names of a server and what they mean, and what a server was asked to serve. Torch-free: the HTTP process knows
no more of a model, and commands check their arguments before they import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orbit_runtime.errors import UsageError

POLICY = "policy"
"""The model name of an adapter without a name."""


def check_one_source(source: str | None, model: str | None) -> None:
    """Raises UsageError if neither or both of a run and a model were named."""
    if (source is None) == (model is None):
        raise UsageError(
            "name either a run or a model",
            fix="name a run folder, a manifest's file, or --model with --adapter; `orbit ls` lists runs",
        )


@dataclass(frozen=True)
class ServedModel:
    """The model behind one name."""

    name: str
    slot: str | None
    """The adapter's slot; None for the base."""
    place: str
    """The place it was read from."""
    version: int | None = None
    digest: str = ""
    chosen: str = ""
    """Why it is this adapter of its run."""

    @property
    def fingerprint(self) -> str:
        return f"{self.name}@{self.digest.removeprefix('tree:')[:12] or 'base'}"

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "orbit",
            "root": self.place,
            "policy_version": self.version,
            "digest": self.digest or None,
        }
