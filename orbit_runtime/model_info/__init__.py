"""Facts about models without loading them and without torch: headers, families, shipped model and GPU cards.

Belongs here: what files say about themselves. Does not belong here: tensors' values, memory arithmetic (`planner`).
"""
