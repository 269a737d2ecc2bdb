"""The model that is trained and sampled: a frozen base read as it lies on disk, adapters over it, and its log-probs.

Belongs here: loading, attention over packed sequences, log-probs in chunks.
Does not belong here: sampling (`rollout`), optimising (`training`), or the formats and adapters themselves.
"""

from orbit_runtime.policy.load import load_policy
from orbit_runtime.policy.model import Policy

__all__ = ["Policy", "load_policy"]
