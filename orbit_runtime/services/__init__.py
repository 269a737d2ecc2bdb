"""Trainer and inference as processes of their own, and the orchestrator that runs the loop with them over HTTP.

Belongs here: exactly-once calls between them, and restoring the state of a process that was lost. Does not belong here:
the loop (`loop`), HTTP for other clients (`serve`), or the computations of trainer and engine.
"""
