"""Puts the engine to sleep while the trainer works on the same device; parity is checked after its first wake.

Belongs here: when it sleeps, how much memory that frees, and the check after the first wake. Does not belong here: how
a server sleeps (`rollout`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from orbit_runtime.loop.parity import check_sides
from orbit_runtime.loop.parts import Parts
from orbit_runtime.loop.state import RunState


@contextmanager
def engine_asleep(parts: Parts, state: RunState) -> Iterator[None]:
    """Applies `rollout.sleep` of the manifest; the value `None` means no sleep.

    Raises:
        GateError: a server holds a different adapter after its sleep.
    """
    if parts.spec.rollout.sleep == "None":
        yield
        _give_back()
        return
    if state.sleep is None:
        state.sleep = _measured_sleep(parts)
    else:
        parts.engine.sleep()
    yield
    _give_back()
    parts.engine.wake()


def _give_back() -> None:
    """Frees torch's cached GPU memory, which the engine's cache is planned to use."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_first_wake(parts: Parts, state: RunState) -> None:
    """Measures parity again, once, with the policy just published. Raises GateError."""
    if parts.spec.rollout.sleep != "None" and not state.woken:
        parts.show.stage("parity after the first wake")
        check_sides(parts, state, "wake")
        state.woken = True


def _measured_sleep(parts: Parts) -> dict[str, int]:
    awake = _memory(parts)
    parts.engine.sleep()
    asleep = _memory(parts)
    found = {"awake_bytes": awake, "asleep_bytes": asleep}
    parts.show.note(f"while it sleeps the engine keeps {asleep / 2**30:.2f} of {awake / 2**30:.2f} GiB", **found)
    return found


def _memory(parts: Parts) -> int:
    return sum(each.memory_bytes or 0 for each in parts.engine.read_servers())
