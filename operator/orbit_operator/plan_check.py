"""What the planner says of a manifest before any GPU is taken: the condition `PlanAccepted`."""

from __future__ import annotations


def check_plan() -> tuple[str, str, str]:
    """Status, reason and message. Without facts about the model the pod plans first, and refuses with exit code 78."""
    return "Unknown", "PlannerUnavailable", "the pod itself checks what fits before it trains"
