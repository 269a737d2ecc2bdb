"""Measures policies: several models answer the same prompts, every answer is kept, scores have intervals.

Belongs here: playing an environment against a model, the result of each sample, statistics, the table and the page.
Does not belong here: engines and checkpoints (`loop` supplies them), or anything that trains. No torch.
"""
