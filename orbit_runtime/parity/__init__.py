"""Whether the policy that samples is the policy that was trained: floors, gates, and the proof at every publish.

Belongs here: measuring both sides on the same tokens and deciding whether they agree.
Does not belong here: when to measure (`loop`), computing log-probs (`policy`, `rollout`).
"""
