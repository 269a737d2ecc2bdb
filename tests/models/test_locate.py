"""A layer broken on purpose is named, with what is wrong in it: every layer of the shipped model, every fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.files import MODEL_FILE
from orbit_runtime.adapters.state import load_slot
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.parity.locate import Location, locate
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.snapshot import ROTARY, Snapshot, SnapshotPart, take_snapshot
from orbit_runtime.types import AdapterFiles
from tests.integration.engine_inputs import random_adapter
from tests.integration.tiny_families import make_family
from tests.integration.tiny_models import TARGETS

LORA = AdapterConfig(type="LoRA", targets=TARGETS, rank=4, alpha=8.0)
TOKENS = [1, 5, 9, 12, 4, 7, 3, 11, 2, 6]
LAYERS = range(4)


@pytest.fixture(scope="module")
def trainer() -> Policy:
    return load_policy(builtin_folder("tiny-adder", "INT4"), LORA)


@pytest.fixture
def engine() -> Policy:
    """The other side: a second copy, to be broken."""
    return load_policy(builtin_folder("tiny-adder", "INT4"), LORA)


SLOTS = count()


def compare(
    trainer: Policy, engine: Policy, files: AdapterFiles | None = None, held: AdapterFiles | None = None
) -> Location:
    """Under the trainer's `files`, where the engine holds `held`; without files, under the bare base."""
    published = files or random_adapter(trainer, 1)
    name = None
    if files:
        name = f"slot-{next(SLOTS)}"
        load_slot(trainer.injected.layers, name, files.files)
        load_slot(engine.injected.layers, name, (held or files).files)
    ours = take_snapshot(trainer, TOKENS, name, published.files)
    again = take_snapshot(trainer, TOKENS, name, published.files, copies=3)
    theirs = take_snapshot(engine, TOKENS, name, (held or published).files)
    return locate(ours, again, theirs, dtype="float32", group=32)


def test_two_equal_sides_part_nowhere(trainer: Policy, engine: Policy) -> None:
    for files in (None, random_adapter(trainer, 3)):
        found = compare(trainer, engine, files)
        assert found.is_clear, found.sentence()
        assert found.sentence() == "in no layer beyond the floor"
        assert not found.not_compared


def snapshots(trainer: Policy) -> tuple[Snapshot, Snapshot]:
    return take_snapshot(trainer, TOKENS, None, {}), take_snapshot(trainer, TOKENS, None, {}, copies=3)


def without(held: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: each for name, each in held.items() if name not in names}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("point", ["self_attn.attended", "mlp.down_proj", "input_layernorm"])
def test_a_point_that_the_engine_did_not_tell_is_named_and_is_no_agreement(
    trainer: Policy, layer: int, point: str
) -> None:
    """As where a CUDA graph was replayed: nobody computed wrongly, and nobody knows."""
    ours, again = snapshots(trainer)
    name = f"model.layers.{layer}.{point}"
    found = locate(ours, again, replace(ours, points=without(ours.points, name)), dtype="float32", group=32)
    assert (found.point, found.causes, found.missing) == (None, (), (name,))
    assert not found.is_clear
    assert found.verdict() == f"not all layers were compared: the engine did not report {name}"


def test_an_engine_that_told_no_point_at_all_is_no_agreement(trainer: Policy) -> None:
    ours, again = snapshots(trainer)
    found = locate(ours, again, replace(ours, points={}), dtype="float32", group=32)
    assert found.missing == tuple(ours.points)
    assert not found.is_clear
    assert found.sentence().endswith(f"and {len(ours.points) - 8} more")


def test_a_constant_that_the_engine_did_not_tell_is_named(trainer: Policy) -> None:
    ours, again = snapshots(trainer)
    name = f"model.layers.2.self_attn.{ROTARY}"
    theirs = replace(ours, constants=without(ours.constants, name))
    found = locate(ours, again, theirs, dtype="float32", group=32)
    assert (found.missing, found.is_clear) == ((name,), False)


def test_what_an_engine_computes_inside_of_another_module_is_not_missed(trainer: Policy) -> None:
    ours, again = snapshots(trainer)
    inside = [name for name in ours.points if name.startswith("model.layers.1.mlp.")]
    theirs = replace(ours, points=without(ours.points, *inside), absent=("model.layers.1.mlp",))
    assert locate(ours, again, theirs, dtype="float32", group=32).is_clear


def cut(tensor: torch.Tensor, axis: int, count: int) -> tuple[tuple[SnapshotPart, ...], tuple[torch.Tensor, ...]]:
    """As processes of a server hold it."""
    pieces = tensor.chunk(count, axis)
    size = pieces[0].shape[axis]
    parts = tuple(
        SnapshotPart(tensorfile.tensor_digest(each), tuple(each.shape), axis, size * rank, rank)
        for rank, each in enumerate(pieces)
    )
    return parts, pieces


@pytest.mark.parametrize("axis", [0, 1])
def test_tensors_that_are_cut_over_processes_are_compared_part_by_part(trainer: Policy, axis: int) -> None:
    ours, again = snapshots(trainer)
    name = "model.layers.1.mlp.up_proj.weight"
    whole = ours.values((name,))[name][0].clone()
    healthy, _ = cut(whole, axis, 4)
    assert locate(
        ours, again, replace(ours, tensors={**ours.tensors, name: healthy}), dtype="float32", group=32
    ).is_clear
    place = [whole.shape[0] - 3, whole.shape[1] - 5]
    whole[tuple(place)] += 1
    parts, pieces = cut(whole, axis, 4)
    theirs = replace(ours, tensors={**ours.tensors, name: parts}, values=lambda names: {name: pieces})
    (cause,) = locate(ours, again, theirs, dtype="float32", group=32).causes
    assert cause.name == name
    assert f"1 of {pieces[0].numel()} values differ, first at {place}: " in cause.detail
    assert cause.detail.endswith("on rank 3")


def test_a_tensor_of_which_a_part_is_missing_is_not_compared(trainer: Policy) -> None:
    ours, again = snapshots(trainer)
    name = "model.layers.1.mlp.up_proj.weight"
    parts, _ = cut(ours.values((name,))[name][0], 0, 4)
    for told in ((), parts[:2], (parts[0], *parts[2:])):
        theirs = replace(ours, tensors={**ours.tensors, name: told})
        found = locate(ours, again, theirs, dtype="float32", group=32)
        assert found.not_compared == (name,)
        assert found.sentence() == f"in no layer beyond the floor; not compared value by value: {name}"


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "module", ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
)
def test_a_flipped_bit_of_a_packed_weight_is_named(trainer: Policy, engine: Policy, layer: int, module: str) -> None:
    name = f"model.layers.{layer}.{module}"
    engine.model.get_submodule(name).base.weight_packed.view(torch.uint8)[3, 5] ^= 1
    found = compare(trainer, engine)
    assert found.point == name
    (cause,) = found.causes
    assert (cause.kind, cause.name) == ("base tensor", f"{name}.weight")
    assert cause.detail.startswith("1 of ")
    assert "first at [3, " in cause.detail


@pytest.mark.parametrize("layer", LAYERS)
def test_a_wrong_scale_of_one_group_is_named_as_one(trainer: Policy, engine: Policy, layer: int) -> None:
    name = f"model.layers.{layer}.mlp.gate_proj"
    scale = engine.model.get_submodule(name).base.weight_scale
    scale[7, 2] = scale[7, 1] * 1.5
    found = compare(trainer, engine)
    assert found.point == name
    (cause,) = found.causes
    assert cause.name == f"{name}.weight"
    assert "all in row 7, columns 64 to 95: one group's scale" in cause.detail


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("norm", ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm"])
def test_an_epsilon_is_named(trainer: Policy, engine: Policy, layer: int, norm: str) -> None:
    name = f"model.layers.{layer}.{norm}"
    engine.model.get_submodule(name).eps = 1e-2
    found = compare(trainer, engine)
    assert found.point == name.replace("q_norm", "query")
    (cause,) = found.causes
    assert (cause.kind, cause.name) == ("constant", f"{name}.eps")
    assert cause.detail.endswith("in the trainer, 0.01 in the engine")


def test_another_base_of_the_rotary_angles_is_named(trainer: Policy, engine: Policy) -> None:
    rotary = engine.model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq**1.01
    found = compare(trainer, engine)
    assert found.point == "model.layers.0.self_attn.query"
    assert [cause.name for cause in found.causes] == [f"model.layers.{layer}.self_attn.{ROTARY}" for layer in LAYERS]
    assert all("another base" in cause.detail for cause in found.causes)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_slice_of_the_adapter_is_named(trainer: Policy, engine: Policy, layer: int) -> None:
    files = random_adapter(trainer, 5)
    name = f"model.layers.{layer}.self_attn.k_proj"
    held = changed(files, f"base_model.model.{name}.lora_B.weight", lambda b: torch.cat((b[:32] * 2, b[32:])))
    found = compare(trainer, engine, files, held)
    assert found.point == name
    (cause,) = found.causes
    assert (cause.kind, cause.name) == ("adapter tensor", f"{name}.lora_B")


@pytest.mark.parametrize("layer", LAYERS)
def test_a_doubled_adapter_is_named_as_doubled(trainer: Policy, engine: Policy, layer: int) -> None:
    files = random_adapter(trainer, 6)
    name = f"model.layers.{layer}.mlp.down_proj"
    held = changed(files, f"base_model.model.{name}.lora_A.weight", lambda a: a * 2)
    found = compare(trainer, engine, files, held)
    assert found.point == name
    assert "the engine's are 2 times the trainer's" in found.causes[0].detail


def test_a_router_that_computes_in_bf16_is_named(tmp_path: Path) -> None:
    folder, _ = make_family(tmp_path, "qwen3_moe", "BF16")
    config = replace(LORA, targets=("q_proj",))
    trainer, engine = load_policy(folder, config), load_policy(folder, config)
    router = engine.model.model.layers[1].mlp.gate
    router.register_forward_hook(lambda _, __, result: rounded(result))
    found = compare(trainer, engine)
    assert found.point == "model.layers.1.mlp.gate"
    (cause,) = found.causes
    assert (cause.kind, cause.name) == ("constant", "model.layers.1.mlp.gate.precision")


def rounded(result: object) -> object:
    if isinstance(result, tuple):
        return tuple(rounded(each) for each in result)
    return result.bfloat16().float() if isinstance(result, torch.Tensor) and result.is_floating_point() else result


def changed(files: AdapterFiles, key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> AdapterFiles:
    tensors = tensorfile.parse(files.files[MODEL_FILE], where=MODEL_FILE)
    tensors[key] = change(tensors[key])
    return replace(files, files={**files.files, MODEL_FILE: tensorfile.dump(tensors, torch.bfloat16)})
