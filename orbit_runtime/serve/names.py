"""Model names of a server and what they mean, and what a server was asked to serve. Torch-free: the HTTP process knows
no more of a model, and commands check their arguments before they import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orbit_runtime.errors import UsageError

POLICY = "policy"
"""The model name of an adapter without a name."""
NEW_NAME = re.compile(r"\w[\w .:@+-]{0,63}(/\w[\w .:@+-]{0,63}){0,3}")
"""Names that a request may add. Example: `team/sums:v2`"""
PROVENANCE = ("run", "policy_version", "digest", "evaluation")
PATH_BYTES, PART_BYTES = 4095, 255
"""Most bytes of a path, and of each of its parts."""


def check_one_source(source: str | None, model: str | None) -> None:
    """Raises UsageError if neither or both of a run and a model were named."""
    if (source is None) == (model is None):
        raise UsageError(
            "name either a run or a model",
            fix="name a run folder, a manifest's file, or --model with --adapter; `orbit ls` lists runs",
        )


def address_fault(place: str) -> str:
    """Why no weights can be at an address, as far as its text tells; empty if they can."""
    path = place.removeprefix("file://")
    if not place.strip():
        return "the address is empty"
    if "\0" in path:
        return "the address contains a NUL"
    if re.match("~[^/]", path):
        return f"the address names the folder of a user, {path.partition('/')[0][:64]}: write its path"
    longest = max(len(part.encode()) for part in path.split("/"))
    if len(path.encode()) > PATH_BYTES or (longest > PART_BYTES and "://" not in path):
        return f"the address has more than {PATH_BYTES} bytes, or a part of it more than {PART_BYTES}"
    return ""


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
    run: str | None = None
    """Name of the run that published it."""
    evaluation: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """Environment → mean reward with its interval."""

    @property
    def provenance(self) -> bytes:
        """Value of the header of every answer: JSON in ASCII, which a manifest's texts cannot break out of."""
        return json.dumps({name: value for name, value in self.to_json().items() if name in PROVENANCE}).encode()

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
            "run": self.run,
            "policy_version": self.version,
            "digest": self.digest or None,
            "evaluation": dict(self.evaluation) or None,
        }
