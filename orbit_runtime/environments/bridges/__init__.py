"""Environments of other packages, unchanged, played by Orbit's environment processes.

Belongs here: one file per package, imported only in an environment's process. Does not belong here: what the packages
do, or the order of turns (`turns`).
"""
