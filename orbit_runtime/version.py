"""Orbit's version, which is also its images' and its chart's."""

__version__ = "0.1.0"
