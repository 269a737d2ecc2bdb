"""The OrbitRun operator: one Job per attempt, restarts that know whose failure it was, a status that says who must act.

Every pass goes observe → plan (pure) → apply → status; a pass that is cut short anywhere is repeated and ends the same.
Imports nothing of `orbit_runtime` but `spec`, `planner`, `model_info` and `errors`, and never torch.
"""
