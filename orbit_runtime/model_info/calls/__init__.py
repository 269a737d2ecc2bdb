"""Formats in which families of models write tool calls: one file per format, pure text.

Belongs here: a format's syntax, and which format a chat template writes. Does not belong here: whether there is such a
tool (`environments.tool_calls`), making calls (`workers`), rendering templates (`data.chat`).
"""
