"""Kubernetes quantities in bytes, and half of one."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def read_quantity(text: str) -> int:
    """Bytes. Example: `read_quantity("2Gi") == 2147483648`."""
    match = re.fullmatch(r"([0-9]+)([A-Za-z]*)", text)
    assert match is not None, text
    return int(match[1]) * _UNITS[match[2]]


def halve(text: str) -> str:
    """Half of a quantity, in the largest unit that needs no fraction. Example: `halve("1Gi") == "512Mi"`."""
    half = read_quantity(text) // 2
    unit = max((unit for unit, size in _UNITS.items() if half % size == 0), key=lambda unit: (_UNITS[unit], len(unit)))
    return f"{half // _UNITS[unit]}{unit}"
