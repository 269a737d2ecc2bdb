"""Whether the product still does what it did: `make same-behaviour`.

Belongs here: what is recorded, and the comparison with the values in `tests/data/same_behaviour`. Does not belong here:
whether what it does is right (`tests`). The product is reached through its command line alone, so that the same command
reads a commit of another shape; `servers` asks that commit's own test of pretended GPUs.
"""
