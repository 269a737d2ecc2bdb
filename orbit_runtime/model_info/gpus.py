"""GPU cards: how much one GPU of a product can hold and how fast it reads it."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class GPUCard:
    """Example: `GPUCard("B200", int(178.35 * 2**30), 7.67e12, ("NVIDIA-B200",), "…")`."""

    name: str
    usable_bytes: int
    """Memory that CUDA makes available to programs; less than the advertised size."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    products: tuple[str, ...]
    """Prefixes of the node label `nvidia.com/gpu.product`, and of the driver's name for it."""
    source: str
    capability: tuple[int, int] | None = None
    """CUDA's compute capability, major and minor; None if unknown."""


CARDS = (
    GPUCard(
        "B200", int(178.35 * GIB), 7.67e12, ("NVIDIA-B200",),
        "total capacity in torch's out-of-memory messages; 7680 bit at 3996 MHz",
        (10, 0),
    ),
    GPUCard(
        "H200", int(139.80 * GIB), 4.8e12, ("NVIDIA-H200",),
        "total capacity in torch's out-of-memory messages; data sheet",
        (9, 0),
    ),
    GPUCard(
        "H100", int(79.10 * GIB), 3.35e12, ("NVIDIA-H100",),
        "80 GB SXM: total capacity in torch's out-of-memory messages; data sheet",
        (9, 0),
    ),
    GPUCard(
        "A100", int(79.15 * GIB), 2.04e12, ("NVIDIA-A100",),
        "80 GB SXM: total capacity in torch's out-of-memory messages; data sheet",
        (8, 0),
    ),
    GPUCard(
        "RTX4090", int(23.64 * GIB), 1.01e12, ("NVIDIA-GeForce-RTX-4090",),
        "total capacity in torch's out-of-memory messages; data sheet",
        (8, 9),
    ),
)  # fmt: skip


def find_gpu(name: str) -> GPUCard | None:
    """Finds a card by short name (`b200`, `RTX 4090`), node label, or the driver's name; None if there is none."""
    wanted = name.strip().replace(" ", "-").lower()
    for card in CARDS:
        if wanted.replace("-", "") == card.name.lower() or wanted.startswith(tuple(p.lower() for p in card.products)):
            return card
    return None
