"""R in static buffers: both ways of turning, on one rank and on several, and which files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from orbit_runtime.adapters.files import CONFIG_FILE, MODEL_FILE, PEFT_PREFIX, ROTATIONS_FILE
from orbit_runtime.adapters.oft import rotate, rotations
from orbit_runtime.errors import InternalError, ModelError
from orbit_runtime.sglang_plugin.adapter_loading import files_of
from orbit_runtime.sglang_plugin.rotation import UNTURNED, LayerRotation, OFTFiles, RotationTable, parts

SIZE, WIDTH = 4, 16
Turn = Callable[[LayerRotation, torch.Tensor], torch.Tensor]
LAYERS = ("model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.down_proj")


def table(*, local: int = WIDTH, rank: int = 0, slots: int = 3) -> RotationTable:
    made = RotationTable(SIZE, slots, torch.device("cpu"), torch.float32)
    for name in LAYERS:
        made.add_layer(name, WIDTH, local_features=local, rank=rank)
    return made


def random_R(seed: int) -> torch.Tensor:
    parameters = torch.randn(WIDTH // SIZE, SIZE * (SIZE - 1) // 2, generator=torch.Generator().manual_seed(seed))
    return rotations(parameters, SIZE, "Cayley", 0).to(torch.bfloat16)


def published(seed: int) -> OFTFiles:
    return OFTFiles({}, {name: random_R(seed + index) for index, name in enumerate(LAYERS)})


def turned_by_kernel(layer: LayerRotation, x: torch.Tensor) -> torch.Tensor:
    """As on a GPU, where a captured pass replays it; here in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed (it comes with torch on Linux)")
    return layer._turn_at_once(x)


def turned_by_runs(layer: LayerRotation, x: torch.Tensor) -> torch.Tensor:
    return layer.turn(x, captured=False)


WAYS = [turned_by_runs, turned_by_kernel]


@pytest.mark.parametrize("turn", WAYS)
def test_rows_are_turned_by_their_own_slot_and_the_others_stay_bit_for_bit(turn: Turn) -> None:
    made = table()
    made.fill(0, published(1))
    made.fill(2, published(2))
    x = torch.randn(11, WIDTH)
    # Slot 1 holds a LoRA; the last row pads the pass.
    made.prepare([0, 0, 1, 2, UNTURNED, 0], [2, 1, 3, 2, 1, 1])
    turned = turn(made.layers[LAYERS[1]], x)
    first, second = (made.layers[LAYERS[1]].buffer[slot] for slot in (0, 2))
    torch.testing.assert_close(turned[:3], rotate(x[:3], first))
    torch.testing.assert_close(turned[6:8], rotate(x[6:8], second))
    torch.testing.assert_close(turned[9:10], rotate(x[9:10], first))
    for start, stop in ((3, 6), (8, 9), (10, 11)):
        assert torch.equal(turned[start:stop], x[start:stop])
    dense = torch.block_diag(*first)
    torch.testing.assert_close(turned[:3], x[:3] @ dense)


def test_a_shorter_pass_forgets_the_rows_of_the_one_before() -> None:
    """A captured pass is as long as its size, not as its batch: rows beyond must not keep a slot."""
    made = table()
    made.fill(0, published(1))
    made.prepare([0], [8])
    made.prepare([0], [2])
    x = torch.randn(8, WIDTH)
    turned = turned_by_kernel(made.layers[LAYERS[0]], x)
    assert torch.equal(turned[2:], x[2:])
    assert not torch.equal(turned[:2], x[:2])


def test_a_rank_turns_its_part_of_the_input_by_its_part_of_R() -> None:
    x = torch.randn(5, WIDTH)
    whole = table()
    whole.fill(0, published(1))
    whole.prepare([0], [5])
    expected = whole.layers[LAYERS[1]].turn(x, captured=False)
    for rank in range(2):
        part = table(local=WIDTH // 2, rank=rank)
        part.fill(0, published(1))
        part.prepare([0], [5])
        cut = slice(rank * WIDTH // 2, (rank + 1) * WIDTH // 2)
        for turn in WAYS:
            turned = turn(part.layers[LAYERS[1]], x[:, cut].contiguous())
            torch.testing.assert_close(turned, expected[:, cut])
    with pytest.raises(ModelError, match="do not divide the 6 input features"):
        table(local=6)


def test_a_cleared_slot_turns_nothing_and_keeps_nothing() -> None:
    made = table()
    made.fill(0, published(1))
    made.prepare([0], [4])
    made.clear(0)
    made.clear(0)
    assert not any(layer.buffer.any() for layer in made.layers.values())
    made.prepare([0], [4])
    x = torch.randn(4, WIDTH)
    assert made.layers[LAYERS[0]].turn(x, captured=False) is x


def test_buffers_never_move_whatever_is_loaded() -> None:
    made = table()
    places = [layer.buffer.data_ptr() for layer in made.layers.values()] + [made.rows.slots_T.data_ptr()]
    for seed in range(4):
        made.fill(seed % 3, published(seed))
        made.prepare([seed % 3], [4])
        made.clear(seed % 3)
    assert places == [layer.buffer.data_ptr() for layer in made.layers.values()] + [made.rows.slots_T.data_ptr()]


def test_segments_that_reach_beyond_the_pass_are_a_bug() -> None:
    made = table()
    made.fill(0, published(1))
    made.prepare([0], [4])
    with pytest.raises(InternalError, match="row 4 of 3"):
        made.layers[LAYERS[0]].turn(torch.randn(3, WIDTH), captured=False)


def write(folder: Path, *, spoil: str = "") -> None:
    names = [f"{part}.oft_R" for layer in LAYERS for part in parts(layer)]
    parameters = {f"{PEFT_PREFIX}{name}.weight": torch.zeros(WIDTH // SIZE, SIZE * (SIZE - 1) // 2) for name in names}
    turned = {name: random_R(1 if "self_attn" in name else 2) for name in names}
    if spoil == "missing":
        del turned[names[1]]
    elif spoil == "differs":
        turned[names[1]] = random_R(3)
    elif spoil == "too many":
        turned["model.layers.0.mlp.up_proj.oft_R"] = random_R(1)
    elif spoil == "dtype":
        turned[names[1]] = turned[names[1]].float()
    (folder / MODEL_FILE).write_bytes(save(parameters))
    (folder / ROTATIONS_FILE).write_bytes(save(turned))
    size = 8 if spoil == "block size" else SIZE
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "OFT", "oft_block_size": size}))


def test_files_give_one_R_for_each_input(tmp_path: Path) -> None:
    write(tmp_path)
    loaded = table().load(files_of(tmp_path))
    assert set(loaded.rotations) == set(LAYERS)
    assert torch.equal(loaded.rotations[LAYERS[0]], random_R(1))
    assert len(loaded.parameters) == 4


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ("missing", "k_proj.oft_R is missing"),
        ("differs", "k_proj.oft_R differs from .*q_proj.oft_R"),
        ("too many", "up_proj.oft_R belongs to no layer"),
        ("dtype", "k_proj.oft_R is torch.float32"),
        ("block size", "oft_block_size is 8, this server was started for 4"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path, spoil: str, says: str) -> None:
    write(tmp_path, spoil=spoil)
    with pytest.raises(ModelError, match=says):
        table().load(files_of(tmp_path))


def test_all_experts_of_a_layer_share_the_R_of_their_files(tmp_path: Path) -> None:
    place = "model.layers.0.mlp.experts"
    made = RotationTable(SIZE, 2, torch.device("cpu"), torch.float32)
    layer = made.add_layer(f"{place}.gate_up_proj", WIDTH, names=(f"{place}.w1", f"{place}.w3"))
    R = random_R(1)[None]
    parameters = torch.zeros(1, WIDTH // SIZE, SIZE * (SIZE - 1) // 2)
    names = [f"{name}.oft_R" for name in layer.names]
    (tmp_path / MODEL_FILE).write_bytes(save({f"{PEFT_PREFIX}{name}.weight": parameters.clone() for name in names}))
    (tmp_path / ROTATIONS_FILE).write_bytes(save({name: R.clone() for name in names}))
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"peft_type": "OFT", "oft_block_size": SIZE}))
    made.fill(1, made.load(files_of(tmp_path)))
    held = dict(layer.named(layer.buffer[1]))
    assert list(held) == names
    assert all(torch.equal(tensor.bfloat16(), R) for tensor in held.values())
    made.prepare([1], [3])
    x = torch.randn(3, WIDTH)
    for turn in WAYS:
        torch.testing.assert_close(turn(layer, x), rotate(x, R[0].float()))
