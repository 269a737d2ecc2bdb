"""Environments of other packages, unchanged, as this one's processes play them.

Belongs here: one file per package, imported only in an environment's process. Does not belong here: what the packages
do, or the order of turns (`multi_turn`).
"""
