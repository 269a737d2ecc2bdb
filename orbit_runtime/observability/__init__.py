"""Observing a run: metrics, logs, progress, the status server and the report.

Belongs here: the table of metrics, and everything that renders numbers for users, scrapers and scripts.
Does not belong here: deciding what to measure or when to stop (`loop`), or torch.
"""
