"""Kernels over weights.

Triton's dequantise, and multiply forward and for the input gradient, dense and grouped; each has a torch twin, the
codec, or `quant.linear` and `quant.grouped`, and `choice` decides which of the two runs. `panels`, which `compiled`
compiles, is for CPUs.
Belongs here: kernels, their launch, the choice. Does not belong here: formats, autograd, anything that knows a model.
Without Triton, `choice`, `operands`, `compiled` and `panels` can be imported.
"""
