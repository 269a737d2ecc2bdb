"""What every kind of child process shares, once.

Belongs here: starting and ending one, frames of messages, stacks, limits on output, signals, signs of life, and the
token of a run. Does not belong here: what one kind of child does.
"""
