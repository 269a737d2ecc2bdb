"""The arithmetic of RL: advantages, losses, corrections and reductions, as pure functions that compose.

Belongs here: numbers and tensors in, numbers and tensors out, with the paper and equation cited. Does not belong here:
models, optimisers, recording of metrics, which parts make up a named algorithm (`spec.objectives`). `own`
has the functions of the user's that stand in their place. `advantages`, `shaping`, `kl_reward`, `reduction` and `own`
are stdlib only; the others import torch.
"""
