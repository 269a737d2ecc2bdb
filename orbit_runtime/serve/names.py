"""What a model name stands for. Torch-free, because it is all that the process that speaks HTTP knows of a model.

Belongs here: the record. Does not belong here: slots and their proof (`policies`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

POLICY = "policy"
"""The model name of an adapter without a name."""


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
