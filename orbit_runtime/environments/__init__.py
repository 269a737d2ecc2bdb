"""Environments of the policy: from prompts to requests, from completions and scores to rollouts.

Belongs here: environments, and the rewards that ship with Orbit. Does not belong here: sampling (`rollout`), processes
(`workers`).
"""

from orbit_runtime.workers.user_code.environment_protocol import Branch, Chosen, Policy, Step

__all__ = ["Branch", "Chosen", "Policy", "Step"]
