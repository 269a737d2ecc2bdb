"""Collecting an agent's trajectories and improving the agent from Python; loads no torch before training.

Belongs here: datasets of trajectories, generating and cleaning data, drivers of training and evolution, and access to
the loop. Does not belong here: training itself (`loop`), which is the same as for a manifest.
"""

from orbit_runtime.agents.evolution import (
    EvolutionConfig,
    EvolutionEpoch,
    EvolutionPhase,
    EvolutionPipeline,
    EvolutionResult,
    EvolutionStrategy,
)
from orbit_runtime.agents.items import TrajectoryItem
from orbit_runtime.agents.near_duplicates import deduplicate
from orbit_runtime.agents.synthesis import (
    DataSynthesiser,
    SynthesisConfig,
    SynthesisPipeline,
    SynthesisResult,
    TemplateSynthesiser,
    augment_add_noise,
    augment_swap_io,
    filter_by_score,
    split_dataset,
)
from orbit_runtime.agents.trainer import TrainConfig, Trainer, TrainerState, TrainMetrics
from orbit_runtime.agents.trajectory import DefaultStrategy, TrajectoryDataset, TrajectoryStrategy
from orbit_runtime.agents.verl import RewardSpec, VeRLAlgorithm, VeRLConfig, VeRLTrainer

__all__ = [
    "DataSynthesiser",
    "DefaultStrategy",
    "EvolutionConfig",
    "EvolutionEpoch",
    "EvolutionPhase",
    "EvolutionPipeline",
    "EvolutionResult",
    "EvolutionStrategy",
    "RewardSpec",
    "SynthesisConfig",
    "SynthesisPipeline",
    "SynthesisResult",
    "TemplateSynthesiser",
    "TrainConfig",
    "TrainMetrics",
    "Trainer",
    "TrainerState",
    "TrajectoryDataset",
    "TrajectoryItem",
    "TrajectoryStrategy",
    "VeRLAlgorithm",
    "VeRLConfig",
    "VeRLTrainer",
    "augment_add_noise",
    "augment_swap_io",
    "deduplicate",
    "filter_by_score",
    "split_dataset",
]
