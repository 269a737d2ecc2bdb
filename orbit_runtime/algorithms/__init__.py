"""The arithmetic of RL: advantages, losses and reductions, as pure functions.

Belongs here: numbers and tensors in, numbers and tensors out, with the paper and equation cited. Does not belong here:
models, optimisers, recording of metrics. `advantages` and `reduction` are stdlib only; `losses` and `distribution`
import torch.
"""
