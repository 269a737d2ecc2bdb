"""Rollout servers as processes: here, or in another container through its agent.

Belongs here: starting, watching and ending them. Does not belong here: requests to them (`rollout`).
"""
