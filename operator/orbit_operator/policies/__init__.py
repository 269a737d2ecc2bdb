"""Decisions, one per file: pure functions of facts and time, independent of the cluster's API."""
