"""Differences between adapters have the name of what happened."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save

from orbit_runtime.adapters.files import CONFIG_FILE, ROTATIONS_FILE
from orbit_runtime.adapters.state import explain_difference

A, B = "model.layers.0.mlp.down_proj.oft_R", "model.layers.1.mlp.down_proj.oft_R"


def files(tensors: dict[str, torch.Tensor], **settings: object) -> dict[str, bytes]:
    return {ROTATIONS_FILE: save(tensors), CONFIG_FILE: json.dumps(settings).encode()}


def pair() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {name: torch.randn(3, 4, 4, generator=made).to(torch.bfloat16) for name in (A, B)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda R, _: R.transpose(-1, -2).contiguous(), f"{A} is transposed (1 of 2 tensors differs)"),
        (lambda R, _: torch.zeros_like(R), f"{A} is zero"),
        (lambda R, _: torch.eye(4).expand_as(R).to(R).contiguous(), f"{A} is the identity"),
        (lambda R, _: R * 2, f"{A} is 2 times what was published"),
        (lambda _, other: other.clone(), f"{A} holds {B}"),
        (lambda R, _: R[:2].clone(), f"{A} is [2, 4, 4], published was [3, 4, 4]"),
    ],
)
def test_a_spoiled_tensor_is_named(change, says: str) -> None:
    published = pair()
    found = published | {A: change(published[A], published[B])}
    assert explain_difference(files(published), files(found)).startswith(says)


def test_one_flipped_bit_is_told_as_one_value() -> None:
    published = pair()
    found = {name: tensor.clone() for name, tensor in published.items()}
    found[A].view(torch.int16)[1, 2, 3] ^= 1
    assert explain_difference(files(published), files(found)) == (
        f"{A} has other values (1 of 48) (1 of 2 tensors differs)"
    )


def test_equal_files_have_no_difference_and_many_differences_are_cut_short() -> None:
    published = pair()
    assert explain_difference(files(published, r=4), files(pair(), r=4)) == ""
    found = {name: tensor * 3 for name, tensor in published.items()}
    said = explain_difference(files(published, r=4), files(found, r=8))
    assert said.startswith("r is 8, published was 4; ")
    assert said.endswith("; … (3 of 2 tensors differ)")


def test_what_is_missing_or_does_not_parse_is_told() -> None:
    published = files(pair())
    assert "rotations.safetensors is missing" in explain_difference(published, {CONFIG_FILE: published[CONFIG_FILE]})
    assert f"{B} is missing" in explain_difference(published, files({A: pair()[A]}))
    assert ROTATIONS_FILE in explain_difference(published, published | {ROTATIONS_FILE: b"short"})
