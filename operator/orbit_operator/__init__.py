"""The OrbitRun operator: one Job per attempt, restarts that know the cause of failure, a status that says who must act.

Every pass goes observe → plan (pure) → apply → status; an interrupted pass can be repeated with the same result.
Imports nothing of `orbit_runtime` but `spec`, `planner`, `model_info` and `errors`, and never torch.
"""
