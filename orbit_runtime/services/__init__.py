"""Trainer and inference as processes of their own, and the orchestrator that runs the loop with them over HTTP.

Belongs here: what travels between them, exactly once, and how a process that was lost is brought back to where it was.
Does not belong here: the loop (`loop`), HTTP for other clients (`serve`), or what trainer and engine compute.
"""
