"""Orbit's Python interface: train a manifest, read a run folder. `orbit_runtime` exports its names; the command line is
another caller.

Belongs here: the few stable names (docs/python/README.md), and the checks before every run. Does not belong here:
training (`loop`), judging runs (`observability`), printing (`cli`).
"""
