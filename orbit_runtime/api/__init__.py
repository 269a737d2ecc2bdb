"""What a program asks of Orbit: train a manifest, read a run folder. `orbit_runtime` gives its names; the command line
is another caller.

Belongs here: the few names that stay (docs/python/README.md), and what every start of a run checks first. Does not
belong here: training (`loop`), judging runs (`observability`), printing (`cli`).
"""
