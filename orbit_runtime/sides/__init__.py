"""Trainer and engine of a run, wherever they are: in this process, in ranks, in servers started or attached.

Belongs here: the interface to them, opening them from a manifest's blocks, and what both need to be opened: the
machine, inputs, content by digest. Does not belong here: the order of a step and the life of a run (`loop`), sides in
other processes (`services`), computing (`training`, `rollout`).
"""
