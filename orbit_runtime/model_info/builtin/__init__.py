"""Checkpoints that ship with Orbit as data: one folder per model and variant, and `digests.json` (every SHA-256).

No code belongs here; `orbit_runtime.model_info.builtin_models` finds and checks them, `tools/` makes them.
"""
