"""Measuring a policy: the same prompts asked of several models, every answer kept, scores with intervals.

Belongs here: playing an environment against a model, what came of each sample, its statistics, the table and the page.
Does not belong here: engines and checkpoints (`loop` hands them in), or anything that trains. No torch.
"""
