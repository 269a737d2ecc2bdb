"""OFT, input-centric (Qiu et al., arXiv 2506.19847), in PEFT 0.21's conventions: `y = base(x R)`, R block-diagonal.

Q is skew-symmetric, its upper triangle filled row by row from the parameters. PEFT's two parametrisations rotate in
opposite directions for the same Q, and both are supported: files record which one was used.
    Cayley          R = (I - Q)(I + Q)^-1
    CayleyNeumann   R = I + 2Q + 2Q² + … + Q^(n-1), for n = 5: I + 2Q + 2Q² + 2Q³ + Q⁴, close to (I + Q)(I - Q)^-1
R is built in fp32 and rounded to BF16 once; the rounded R is what trainer and engine multiply by.

Shapes: parameters `[K/b, b(b-1)/2]`, R `[K/b, b, b]`, x `[..., K]`; experts have one more leading axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orbit_runtime.errors import ManifestError


@dataclass(slots=True, eq=False)
class OFTSlot:
    """The values that one layer multiplies by: published BF16 values, widened to the compute dtype."""

    rotation: Tensor
    parameters: Tensor | None = None
    """The fp32 parameters published with R: kept for reading back, never multiplied."""
    named: dict[str, Tensor] | None = field(default=None, repr=False)
    """The tensors by file name, once they have been requested from the layer."""

    def tensors(self) -> dict[str, Tensor]:
        return {"oft_R": self.rotation}


def check_block_size(module_name: str, in_features: int, block_size: int) -> None:
    """Raises unless the block size divides the layer's input. (PEFT silently uses another one.)"""
    if block_size > 1 and in_features % block_size == 0:
        return
    divisors = [size for size in range(2, in_features + 1) if in_features % size == 0]
    below = max((size for size in divisors if size < block_size), default=None)
    above = min((size for size in divisors if size > block_size), default=None)
    near = " or ".join(str(size) for size in (below, above) if size is not None)
    raise ManifestError(
        f"blocks of {block_size} do not divide the {in_features} input features of {module_name}",
        where="spec.adapter.oft.blockSize",
        fix=f"use {near}, or leave the module out of spec.adapter.targets",
    )


def num_parameters(in_features: int, block_size: int) -> int:
    return in_features // block_size * (block_size * (block_size - 1) // 2)


@functools.cache
def _upper_triangle(block_size: int, device: torch.device) -> Tensor:
    """The cell of a flattened `[b, b]` block that each parameter fills."""
    rows, columns = torch.triu_indices(block_size, block_size, 1)
    return (rows * block_size + columns).to(device)


def skew_symmetric(parameters: Tensor, block_size: int) -> Tensor:
    """`[n, b(b-1)/2]` → Q `[n, b, b]`. No parameter is gathered twice, so backward has no unordered sum."""
    cells = _upper_triangle(block_size, parameters.device)
    # Of the operations that write cells, this one keeps none of the parameters for its backward.
    blocks = torch.arange(len(parameters), device=parameters.device)[:, None]
    upper = parameters.new_zeros(len(parameters), block_size**2).index_put((blocks, cells), parameters)
    upper = upper.view(-1, block_size, block_size)
    return upper - upper.transpose(1, 2)


def rotations(parameters: Tensor, block_size: int, parametrization: str, neumann_terms: int) -> Tensor:
    """fp32 R `[n, b, b]` of n blocks, which may belong to many layers: building them together is much faster."""
    Q = skew_symmetric(parameters.float(), block_size)
    identity = torch.eye(block_size, device=Q.device)
    if parametrization == "Cayley":
        R: Tensor = torch.linalg.solve(identity + Q, identity - Q, left=False)
        return R
    R = identity.expand_as(Q)
    if neumann_terms > 1:
        R = R + 2.0 * Q
    if neumann_terms > 2:
        power = torch.bmm(Q, Q)
        R = R + 2.0 * power
        # As in PEFT: powers 3 .. n-2 count twice and the last one once (so n = 3 and n = 4 are the same series).
        for _ in range(3, neumann_terms - 1):
            power = torch.bmm(power, Q)
            R = R + 2.0 * power
        R = R + torch.bmm(power, Q)
    return R


def series_error(parameters: Iterable[Tensor], block_size: int, parametrization: str, neumann_terms: int) -> float:
    """A bound on `|R - C|` over all blocks, with C the exact rotation that the series approximates; 0 for Cayley.

    The series of n terms is `C (I - Q^m)` with m = 3 for n = 3 and 4, else n - 1, and C preserves lengths, so the error
    is `|Q|^m`; shorter series leave a remainder of at most `2 |Q|^n`. Q's eigenvalues come in pairs ±i s, so
    `|Q| <= |Q|_F / √2`.
    """
    if parametrization == "Cayley":
        return 0.0
    squares = torch.stack([each.detach().float().square().sum(-1).max() for each in parameters])
    # |Q|_F² is twice the sum over its upper triangle.
    largest = float(squares.max().sqrt())
    if neumann_terms < 3:
        return float(2.0 * largest**neumann_terms)
    return float(largest ** max(neumann_terms - 1, 3))


def constrained(parameters: Tensor, eps: float) -> Tensor:
    """COFT: projects blocks of Q outside the ball around 0 back to its surface, as PEFT does."""
    radius = eps / math.sqrt(parameters.shape[-2])
    norms = math.sqrt(2.0) * torch.linalg.vector_norm(parameters, dim=-1, keepdim=True)
    return torch.where(norms <= radius, parameters, parameters * (radius / norms))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """`x @ blockdiag(R)`, as one batched product over the blocks."""
    blocks, size, _ = rotation.shape
    x_blocks = x.reshape(-1, blocks, size).transpose(0, 1)
    return torch.bmm(x_blocks, rotation.to(x.dtype)).transpose(0, 1).reshape(x.shape)
