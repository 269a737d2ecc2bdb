"""A language model beside a tower for images, as in Kimi-K2.6: only the former is trained, and files name it alone.

Belongs here: what SGLang's names of its modules begin with. Does not belong here: what is read of them (`readback`,
`weights`, `taps`).
"""

from __future__ import annotations

from typing import Any

OWNER = "language_model"


def language_model(model: Any) -> Any:
    """The part of SGLang's model that computes text: all of it if there is no tower."""
    return getattr(model, OWNER, None) or model


def name_in_files(name: str) -> str:
    """`language_model.model.layers.0.mlp` → `model.layers.0.mlp`."""
    return name.removeprefix(f"{OWNER}.")
