"""Facts about models without loading them and without torch: safetensors headers, quantisation configs, shipped models.

Belongs here: what files say about themselves. Does not belong here: tensors' values, memory arithmetic (`planner`).
"""
