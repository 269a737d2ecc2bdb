"""From prompts to samples and micro-batches: reading data, chat tokens, what trains, packing, and rollout files.

Belongs here: everything between a file of rows and a list of token ids, torch-free. Does not belong here: sampling,
scoring (`environments`), tensors (`training`), or where bytes are kept (`storage`).
"""
