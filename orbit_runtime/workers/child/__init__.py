"""Shared by all kinds of child processes.

Belongs here: starting and ending one, frames of messages, stacks, limits on output, signals, signs of life, and the
token of a run. Does not belong here: what one kind of child does.
"""
