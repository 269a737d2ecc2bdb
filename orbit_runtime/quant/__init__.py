"""Frozen base weights: one file per on-disk format (its bit-exact codec) and the frozen linear layer over them.

Belongs here: packing, unpacking, dequantising, and multiplication by packed weights with a gradient for the input only.
Does not belong here: adapters, reading checkpoint files, deciding which modules of a model are quantised.
"""
