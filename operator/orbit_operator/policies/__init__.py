"""Decisions, one per file: pure functions of facts and time. Nothing here knows of the cluster's API."""
