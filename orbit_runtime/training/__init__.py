"""Trainers: they change the adapter and nothing else.

Belongs here: optimiser, schedule, mini-batches and micro-batches, checkpoint state.
Does not belong here: where samples come from (`loop`), losses (`algorithms`), the model (`policy`).
"""

from typing import TYPE_CHECKING

from orbit_runtime.lazy import lazily

if TYPE_CHECKING:
    from orbit_runtime.training.settings import TrainerSettings
    from orbit_runtime.training.torch_trainer import TorchTrainer

__all__ = ["TorchTrainer", "TrainerSettings"]
# Only who asks for these imports torch.
__getattr__ = lazily(
    __name__,
    {
        "TorchTrainer": "orbit_runtime.training.torch_trainer",
        "TrainerSettings": "orbit_runtime.training.settings",
    },
)
