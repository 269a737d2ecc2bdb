"""Orbit: RL post-training of adapters on a frozen, quantised base."""

__version__ = "0.1.0"
