"""Plans a run before it takes a GPU: bytes per device by part and phase, layout, support, and whether it fits.

Belongs here: arithmetic over facts that callers supply. Pure: no torch, no files, no clock, no network.
Does not belong here: finding the facts (`model_info`), printing (`cli`).
"""

from orbit_runtime.planner.job import Machine
from orbit_runtime.planner.plan import Plan, check_fits, plan
from orbit_runtime.planner.support import Problem
from orbit_runtime.planner.verdict import Verdict, check_verdict, judge

__all__ = ["Machine", "Plan", "Problem", "Verdict", "check_fits", "check_verdict", "judge", "plan"]
