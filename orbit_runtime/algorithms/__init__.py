"""The arithmetic of RL: advantages, losses, corrections and reductions, as pure functions that compose.

Belongs here: numbers and tensors in, numbers and tensors out, with the paper and equation cited. Does not belong here:
models, optimisers, recording of metrics, which parts make up a named algorithm (`spec.objectives`). `custom_loss` loads
the user's functions that replace the ones here. `advantages`, `constants`, `table` and `custom_loss` import no torch.
"""

from typing import TYPE_CHECKING

from orbit_runtime.lazy import lazily

if TYPE_CHECKING:
    from orbit_runtime.algorithms.advantages import ScoredGroup
    from orbit_runtime.algorithms.losses import LossInputs, TokenLosses

__all__ = ["LossInputs", "ScoredGroup", "TokenLosses"]

__getattr__ = lazily(
    __name__,
    {
        "LossInputs": "orbit_runtime.algorithms.losses",
        "ScoredGroup": "orbit_runtime.algorithms.advantages",
        "TokenLosses": "orbit_runtime.algorithms.losses",
    },
)
