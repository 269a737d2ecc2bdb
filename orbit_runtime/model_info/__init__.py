"""Facts about models without loading them and without torch: headers, families, how they write calls of
tools, shipped model cards and GPU cards.

Belongs here: what files say about themselves. Does not belong here: tensor values, memory arithmetic (`planner`).
"""
