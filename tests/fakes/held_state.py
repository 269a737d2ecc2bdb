"""A trainer's state as bytes, for comparing and for handing to another trainer."""

from __future__ import annotations

from collections.abc import Buffer, Callable, Iterable

from orbit_runtime.types import Trainer


class HeldState:
    """A `StateWriter` that reads everything at once."""

    def __init__(self) -> None:
        self.parts: dict[str, bytes] = {}

    def write(self, name: str, size: int, pieces: Callable[[], Iterable[Buffer]]) -> None:
        self.parts[name] = b"".join(pieces())
        assert len(self.parts[name]) == size

    def wait(self) -> None: ...


def hold_state(trainer: Trainer) -> dict[str, bytes]:
    held = HeldState()
    trainer.save_state(held)
    return held.parts
