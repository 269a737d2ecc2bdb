"""The trainer that is divided among processes, over Megatron-Core: docs/decisions/0090-megatron.md.

Belongs here: what ranks tell each other, and everything that imports Megatron-Core. Does not belong here: what of a
model a rank holds (`policy.shares`), the arithmetic of a step (`training`), starting ranks (`workers`).
"""
