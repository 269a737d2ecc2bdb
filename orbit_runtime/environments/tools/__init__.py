"""Tools that ship with Orbit.

Belongs here: functions that a policy may call, one file each, with a schema built from their signature. Does not belong
here: reading calls (`tool_calls`), running them (`workers`).
"""
