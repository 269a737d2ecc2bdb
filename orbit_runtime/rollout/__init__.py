"""Engines: they answer prompts under a named adapter and say which policy version sampled every token.

Belongs here: the torch engine with its key/value cache, and the engine over servers (SGLang of our own, SGLang and vLLM
of others). Does not belong here: the model (`policy`), what a completion is worth (`environments`), when to publish
(`loop`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orbit_runtime.rollout.torch_engine import TorchEngine

__all__ = ["TorchEngine"]
_MODULES = {"TorchEngine": "orbit_runtime.rollout.torch_engine"}


def __getattr__(name: str) -> Any:
    """Only who asks for these imports torch: parts of this package do without."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
