"""What a model name stands for, and what a server was asked to serve. Torch-free: the process that speaks HTTP knows no
more of a model, and commands check what they were given before they import torch.

Belongs here: the record and the check. Does not belong here: slots and their proof (`policies`).
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
class Served:
    """What one model name stands for."""

    name: str
    slot: str | None
    """None for the base."""
    place: str
    """Where it was read from."""
    version: int | None = None
    digest: str = ""

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
