"""The model that is trained and sampled: a frozen base read as it lies on disk, adapters over it, and its log-probs.

Belongs here: loading, attention over packed sequences, log-probs in chunks.
Does not belong here: sampling (`rollout`), optimising (`training`), or the formats and adapters themselves.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orbit_runtime.policy.load import load_policy
    from orbit_runtime.policy.model import Policy

__all__ = ["Policy", "load_policy"]
_MODULES = {"Policy": "orbit_runtime.policy.model", "load_policy": "orbit_runtime.policy.load"}


def __getattr__(name: str) -> Any:
    """Only who asks for these imports torch: parts of this package do without."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
