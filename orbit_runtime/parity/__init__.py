"""Is the policy that samples the policy that was trained? Floors, gates, and the proof at every publish.

Belongs here: measuring both sides on the same tokens and deciding whether they agree.
Does not belong here: when to ask (`loop`), computing log-probs (`policy`, `rollout`).
"""
