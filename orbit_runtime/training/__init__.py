"""Trainers: they change the adapter and nothing else.

Belongs here: optimiser, schedule, mini-batches and micro-batches, checkpoint state.
Does not belong here: where samples come from (`loop`), losses (`algorithms`), the model (`policy`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orbit_runtime.training.settings import TrainerSettings
    from orbit_runtime.training.torch_trainer import TorchTrainer

__all__ = ["TorchTrainer", "TrainerSettings"]
_MODULES = {
    "TorchTrainer": "orbit_runtime.training.torch_trainer",
    "TrainerSettings": "orbit_runtime.training.settings",
}


def __getattr__(name: str) -> Any:
    """Only who asks for these imports torch: parts of this package do without."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
