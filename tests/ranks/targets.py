"""Ranks that tests start: real torch.distributed over gloo, and a fault on demand."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from fakes.probed import probe

from orbit_runtime.errors import DivergedError
from orbit_runtime.workers.ranks.rank import in_collective, note


class Unpacked:
    """Records where and how it was unpickled."""

    def __init__(self) -> None:
        self.pid, self.colour = os.getpid(), os.environ.get("ORBIT_TEST_COLOUR")

    def __reduce__(self) -> tuple[type[Unpacked], tuple[()]]:
        return Unpacked, ()


class Keeping:
    """A rank that does nothing but keep what it was made with."""

    def __init__(self, given: Unpacked) -> None:
        self.given = given

    def tell(self) -> tuple[int, str | None, int]:
        return self.given.pid, self.given.colour, os.getpid()


class Probed:
    """A rank that looks at itself."""

    def look(self, run: int) -> dict[str, Any]:
        return probe(run)


class Meeting:
    """Joins the others at start; each method is one thing that a trainer's rank may do, or may suffer."""

    def __init__(self, factor: int = 1, timeout: float = 600.0) -> None:
        import torch.distributed as dist

        self.rank, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), self.count, self.rank == 0,
            master_listen_fd=int(os.environ["ORBIT_RENDEZVOUS_FD"]) if self.rank == 0 else None,
        )  # fmt: skip
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.count, timeout=timedelta(seconds=timeout)
        )
        self.factor = factor
        print(f"rank {self.rank} of {self.count} has met the others", flush=True)

    def add(self, number: float) -> float:
        """The sum over ranks of factor * rank * number."""
        import torch
        import torch.distributed as dist

        value = torch.tensor(self.factor * self.rank * number)
        with in_collective("all_reduce of gradients"):
            dist.all_reduce(value)
        return float(value)

    def weigh(self, payload: bytes) -> tuple[int, int]:
        return self.rank, len(payload)

    def pid(self) -> int:
        return os.getpid()

    def see(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def step(self, number: int, fault: str | None = None, at: int = 1) -> float:
        """One step; on rank `at` the fault comes before the collective."""
        note(stage="train", step=number)
        if fault and self.rank == at:
            getattr(self, f"_{fault}")()
            if fault == "return_early":
                return 0.0
        return self.add(number)

    def _return_early(self) -> None:
        pass

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _sleep(self) -> None:
        time.sleep(600)

    def _nan(self) -> None:
        raise DivergedError("the loss is NaN", where="spec.training.learningRate", fix="lower it")

    def _bug(self) -> None:
        raise ValueError("a planted bug")

    def _memory(self) -> None:
        import torch

        torch.empty(1 << 60, dtype=torch.uint8)

    def _segfault(self) -> None:
        import ctypes

        ctypes.string_at(0)

    def _disk(self) -> None:
        with open("/dev/full", "w") as file:
            file.write("x")

    def _leave(self) -> None:
        sys.exit(3)

    def _unpicklable(self) -> None:
        raise Odd(lambda: None)


class Odd(Exception):
    """Cannot be pickled."""

    def __init__(self, made: Any) -> None:
        super().__init__("odd")
        self.made = made
