"""The loss of a critic, over flat tensors of completion tokens.

Belongs here: the value loss. Does not belong here: advantages from values (`advantages`), computing values.

Legend: `_T` the trained tokens of a micro-batch, all samples joined.
"""

from __future__ import annotations

from torch import Tensor


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, weights_T: Tensor, *, clip: float) -> Tensor:
    """The clipped value loss of PPO (openai/baselines ppo2; TRL 1.16 `PPOTrainer`, verl 0.9 `compute_value_loss`).

    ```
    sum_t weights_t * 1/2 max((V_t - R_t)^2, (clip(V_t, V_old,t - clip, V_old,t + clip) - R_t)^2)
    ```
    """
    old_T = old_values_T.detach()
    clipped_T = values_T.clamp(old_T - clip, old_T + clip)
    squares_T = (values_T - returns_T).square().maximum((clipped_T - returns_T).square())
    return (weights_T * squares_T).sum() / 2
