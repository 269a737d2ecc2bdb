"""Trainable adapters (LoRA, OFT) over any base layer: their maths, injection into a model, and PEFT's files.

Belongs here: what an adapter computes, its parameters, its slots, its bytes.
Does not belong here: base formats (`quant`), optimisers, the loop that publishes.
"""
