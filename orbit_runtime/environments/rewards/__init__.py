"""Rewards that ship with Orbit, by their names in a manifest.

Belongs here: one row per reward, as a dotted path, because rewards run in their own worker processes.
Does not belong here: their code, timeouts and restarts (`workers`).
"""

from __future__ import annotations

from collections.abc import Mapping

from orbit_runtime.workers.user_code.reward_protocol import WrongAnswer

__all__ = ["REWARDS", "WrongAnswer"]

REWARDS: Mapping[str, str] = {
    "ExactMatch": "orbit_runtime.environments.rewards.text:exact_match",
    "Math": "orbit_runtime.environments.rewards.math_answer:math_answer",
    "MultipleChoice": "orbit_runtime.environments.rewards.text:multiple_choice",
    "Pattern": "orbit_runtime.environments.rewards.text:pattern",
    "Length": "orbit_runtime.environments.rewards.text:length",
    "Code": "orbit_runtime.environments.rewards.code_tests:code_tests",
    "Judge": "orbit_runtime.environments.rewards.judge:judge",
}
