"""Trainers: they change the adapter and nothing else.

Belongs here: optimiser, schedule, mini-batches and micro-batches, checkpoint state.
Does not belong here: where samples come from (`loop`), losses (`algorithms`), the model (`policy`).
"""

from orbit_runtime.training.settings import TrainerSettings
from orbit_runtime.training.torch_trainer import TorchTrainer

__all__ = ["TorchTrainer", "TrainerSettings"]
