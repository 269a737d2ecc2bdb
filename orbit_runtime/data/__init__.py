"""Reading data, chat tokens, what trains, packing, and rollout files: everything from prompts to micro-batches.

Belongs here: everything between a file of rows and a list of token ids, torch-free. Does not belong here: sampling,
scoring (`environments`), tensors (`training`), or where bytes are kept (`storage`).
"""
