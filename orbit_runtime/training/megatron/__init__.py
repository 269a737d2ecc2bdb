"""The trainer divided among processes, over Megatron-Core: docs/decisions/0016-ranks.md.

Belongs here: communication between ranks, and everything that imports Megatron-Core. Does not belong here: which part
of a model a rank holds (`policy.shares`), the arithmetic of a step (`training`), starting ranks (`workers`).
"""
