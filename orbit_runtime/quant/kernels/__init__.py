"""Triton kernels over packed weights: dequantise, and multiply forward and for the input gradient, dense and grouped.

Each has a torch twin: the codec, or `quant.linear` and `quant.grouped`. `choice` decides which of the two runs.
Belongs here: kernels, their launch, the choice; for CPUs `compiled` and what it compiles. Does not belong here: formats, autograd, anything that knows a model.
Without Triton, `choice`, `operands`, `compiled` and `panels` can be imported.
"""
