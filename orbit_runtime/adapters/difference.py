"""A description of how an adapter differs from the published one: which tensor, and how."""

from __future__ import annotations

import json
from collections.abc import Buffer, Mapping, Sequence

import torch
from torch import Tensor

from orbit_runtime.adapters.files import CONFIG_FILE
from orbit_runtime.adapters.state import parse_tensors
from orbit_runtime.errors import ModelError

NAMED = 2
"""Number of differences that are described individually."""


def explain_difference(published: Mapping[str, Buffer], found: Mapping[str, Buffer]) -> str:
    """Empty if the files are equal.

    Example: `model.layers.1.mlp.down_proj.oft_R is the identity (1 of 14 tensors differs)`
    """
    differences: list[str] = []
    total = 0
    for name in sorted(published.keys() | found.keys()):
        if name not in found or name not in published:
            differences.append(f"{name} is {'missing' if name not in found else 'there and was not published'}")
        elif published[name] == found[name]:
            total += 0 if name == CONFIG_FILE else len(parse_tensors(published, name))
        elif name == CONFIG_FILE:
            differences += _explain_settings(bytes(published[name]), bytes(found[name]))
        else:
            try:
                before, now = parse_tensors(published, name), parse_tensors(found, name)
            except ModelError as error:
                differences.append(f"{name}: {error.message}")
                continue
            total += len(before)
            differences += explain_tensors(before, now)
    return join_differences(differences, total)


def join_differences(differences: Sequence[str], total: int) -> str:
    """The first differences, and their number out of all tensors; empty if there are none."""
    if not differences:
        return ""
    told = "; ".join(differences[:NAMED])
    if len(differences) > NAMED:
        told += "; …"
    return f"{told} ({len(differences)} of {total} tensors {'differs' if len(differences) == 1 else 'differ'})"


def _explain_settings(before: bytes, now: bytes) -> list[str]:
    try:
        old, new = json.loads(before), json.loads(now)
    except ValueError:
        return [f"{CONFIG_FILE} does not parse"]
    return [
        f"{key} is {new.get(key)!r}, published was {old.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def explain_tensors(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> list[str]:
    """One sentence per tensor that differs from the published one."""
    told = [f"{key} is missing" for key in sorted(before.keys() - now.keys())]
    told += [f"{key} is there and was not published" for key in sorted(now.keys() - before.keys())]
    for key in sorted(before.keys() & now.keys()):
        if before[key].shape != now[key].shape:
            told.append(f"{key} is {list(now[key].shape)}, published was {list(before[key].shape)}")
        elif not torch.equal(before[key].float(), now[key].float()):
            told.append(f"{key} {_how(key, before, now[key].float())}")
    return told


def _how(key: str, published: Mapping[str, Tensor], found: Tensor) -> str:
    """The kind of difference between the tensors, if it has a name."""
    before = published[key].float()
    if not bool(found.any()):
        return "is zero"
    if found.dim() >= 2 and found.shape[-1] == found.shape[-2]:
        if torch.equal(found, torch.eye(found.shape[-1]).expand_as(found)):
            return "is the identity"
        if torch.equal(found, before.transpose(-1, -2)):
            return "is transposed"
    largest = before.abs().argmax()
    ratio = float(found.flatten()[largest] / before.flatten()[largest]) if bool(before.any()) else 0.0
    if abs(ratio - 1) > 2**-7 and ratio and torch.allclose(found, before * ratio, rtol=2**-7, atol=0.0):
        return f"is {ratio:.3g} times what was published"
    for other, tensor in published.items():
        if other != key and tensor.shape == found.shape and torch.equal(tensor.float(), found):
            return f"holds {other}"
    wrong = int((found != before).sum())
    return f"has other values ({wrong} of {found.numel()})"
