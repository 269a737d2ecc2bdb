"""The model that is trained and sampled: a frozen base as stored on disk, adapters over it, and its log-probs.

Belongs here: loading, attention over packed sequences, log-probs in chunks.
Does not belong here: sampling (`rollout`), optimising (`training`), or the formats and adapters themselves.
"""

from typing import TYPE_CHECKING

from orbit_runtime.lazy import lazily

if TYPE_CHECKING:
    from orbit_runtime.policy.load import load_policy
    from orbit_runtime.policy.model import Policy

__all__ = ["Policy", "load_policy"]
# torch is imported only when one of these names is used.
__getattr__ = lazily(__name__, {"Policy": "orbit_runtime.policy.model", "load_policy": "orbit_runtime.policy.load"})
