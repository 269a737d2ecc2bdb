"""Rows rotated by their own slots in one kernel, against the loop over runs and against dense products in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from orbit_runtime.adapters.oft import rotate
from orbit_runtime.sglang_plugin import rotation_kernel
from orbit_runtime.sglang_plugin.rotation_kernel import rotate_rows

SLOTS = 5


def made(size: int, blocks: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rotations and more: nothing here needs R to be orthogonal."""
    R = torch.eye(size) + 0.3 * torch.randn(SLOTS, blocks, size, size, generator=torch.Generator().manual_seed(size))
    return R.to(dtype).to(device)


def inputs(rows: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype).to(device)


def mixed(rows: int, device: str, *, runs: bool = False) -> Tensor:
    """Slots 0, 1 and 3 and none, by row or in runs; 2 and 4 are never used."""
    choice = torch.tensor([0, 1, 3, -1], dtype=torch.int32)
    drawn = torch.randint(0, 4, (rows,), generator=torch.Generator().manual_seed(rows + 1))
    slots = choice[drawn.sort().values if runs else drawn]
    return slots.to(device)


def expected(x: Tensor, R: Tensor, slots: Tensor) -> Tensor:
    """fp64."""
    rows = []
    for row, slot in zip(x.double(), slots.tolist(), strict=True):
        rows.append(row if slot < 0 else row @ torch.block_diag(*R[slot].double()))
    return torch.stack(rows) if rows else x.double()


def check(found: Tensor, x: Tensor, R: Tensor, slots: Tensor) -> None:
    """Within the bound of fp32 sums of this length in any order (Higham, Accuracy and Stability, section 3.1), and for
    BF16 half a unit in the last place more."""
    whole = expected(x, R, slots)
    sums = expected(x.abs(), R.abs(), slots)
    bound = R.shape[-1] * 2**-24 * sums + (2**-8 * whole.abs() if x.dtype == torch.bfloat16 else 0)
    assert bool(((found.double() - whole).abs() <= bound).all())


@pytest.mark.parametrize("size", [2, 4, 16, 24, 32, 64, 100, 192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_row_is_turned_by_its_own_slot(size: int, dtype: torch.dtype, device: str) -> None:
    blocks = 2 if size > 32 else 3
    R, x = made(size, blocks, dtype, device), inputs(70, blocks * size, dtype, device)
    for runs in (False, True):
        slots = mixed(70, device, runs=runs)
        found = rotate_rows(x, R, slots)
        assert found.dtype == dtype
        check(found, x, R, slots)
        same = slots < 0
        assert torch.equal(found[same], x[same])


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 130])
def test_any_number_of_rows(rows: int, device: str) -> None:
    R, x, slots = made(16, 2, torch.float32, device), inputs(rows, 32, torch.float32, device), mixed(rows, device)
    found = rotate_rows(x, R, slots)
    assert found.shape == x.shape
    check(found, x, R, slots)


def test_it_equals_its_twin_and_what_else_is_in_the_batch_changes_no_bit(device: str) -> None:
    R, x = made(32, 4, torch.bfloat16, device), inputs(96, 128, torch.bfloat16, device)
    slots = torch.full((96,), 3, dtype=torch.int32, device=device)
    alone = rotate_rows(x, R, slots)
    # The twin's sums may have another order: of two results half a unit apart, one may round up.
    torch.testing.assert_close(alone, rotate(x, R[3]), rtol=2**-7, atol=1e-5)
    slots[1::2] = 0
    slots[70:] = -1
    among = rotate_rows(x, R, slots)
    own = slots == 3
    assert torch.equal(among[own], alone[own])
    assert torch.equal(rotate_rows(x[6:7], R, slots[6:7]), alone[6:7])


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_slots_that_no_row_uses_are_not_read(device: str) -> None:
    R, x, slots = made(16, 2, torch.float32, device), inputs(40, 32, torch.float32, device), mixed(40, device)
    clean = rotate_rows(x, R, slots)
    R[[2, 4]] = float("nan")
    assert torch.equal(rotate_rows(x, R, slots), clean)
    # Nor do values of one row reach another.
    x[slots == 1] = float("inf")
    spoilt = rotate_rows(x, R, slots)
    assert torch.equal(spoilt[slots != 1], clean[slots != 1])


def test_parts_of_wider_tensors_are_read_in_place(device: str) -> None:
    R, wide = made(16, 6, torch.bfloat16, device), inputs(20, 80, torch.bfloat16, device)
    slots, x, part = mixed(20, device), wide[:, 16:64], R[:, 2:5]
    assert torch.equal(rotate_rows(x, part, slots), rotate_rows(x.contiguous(), part.contiguous(), slots))


class Operations(TorchDispatchMode):
    """Names of torch's operations; on a device each launches at least one kernel, except for new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_a_layer_is_one_launch_however_many_slots_there_are(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    launches = []

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launches.append(grid)
            return lambda *arguments, **settings: None

    monkeypatch.setattr(rotation_kernel, "rotation_kernel", Counted())
    R, x, slots = made(32, 4, torch.bfloat16, device), inputs(64, 128, torch.bfloat16, device), mixed(64, device)
    with Operations() as seen:
        rotate_rows(x, R, slots)
    assert launches == [(1, 4)]
    assert seen.names == ["aten.empty.memory_format"]
