"""How per-token losses become one number: a weight per token, known before the batch is split.

Belongs here: reductions as weights, so that loss = sum over tokens of weight * token loss, and a mini-batch gives the
same gradient however it is split into micro-batches. Does not belong here: the token losses. `_D` samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from orbit_runtime.spec.objectives import Reduction


def token_weights(lengths_D: Sequence[int], reduction: Reduction, constant_length: int | None = None) -> list[float]:
    """Weight of each trained token, per sample of one mini-batch; `lengths_D` counts each sample's trained tokens.

    ```
    Token     1 / sum(L)             every token counts the same      DAPO, arXiv:2503.14476 eq. 8   TRL "bnpo", "dapo"
    Sequence  1 / (D * L_i)          every sample counts the same     GRPO, arXiv:2402.03300 eq. 3   TRL "grpo"
    Constant  1 / (D * L_constant)   no length enters                 Dr. GRPO, arXiv:2503.20783     TRL "dr_grpo"
    ```

    D is the number of samples given. Rollouts whose reward timed out or crashed never become samples (`data.samples`),
    so they count neither in D nor in sum(L): a failing reward makes the batch smaller, not the learning rate of the
    other samples. A sample without trained tokens counts in D (as in TRL), and its weight applies to no token.
    """
    if reduction == "Token":
        return [1.0 / max(1, sum(lengths_D))] * len(lengths_D)
    if reduction == "Sequence":
        return [1.0 / (len(lengths_D) * max(1, length)) for length in lengths_D]
    assert constant_length is not None, "the Constant reduction needs its constant length"
    assert constant_length > 0, "the Constant reduction needs a positive length"
    return [1.0 / (len(lengths_D) * constant_length)] * len(lengths_D)
