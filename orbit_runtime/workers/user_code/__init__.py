"""A user's rewards, environments and tools, and programs that a policy writes, in processes that are bound and timed.

Two pools, with limits of their own: a reward keeps its module's state and may start processes, an environment's cell
may not. Does not belong here: what rewards compute, or the content of an episode (`environments`).
"""
