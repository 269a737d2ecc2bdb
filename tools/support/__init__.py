"""The reference page of what SGLang serves.

Belongs here: writing the page. Does not belong here: what it says (`orbit_runtime.planner.support`).
"""
