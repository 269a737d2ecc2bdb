"""A published adapter as described by its files' headers: names, sizes, pieces and the resulting digests; no torch.

    dense                     `<module>.<kind>`
    experts, PerExpert        `….experts.<e>.gate_proj.<kind>`, one per expert: PEFT's names for experts as modules
    experts, SharedOuter      `….experts.w1.<kind>` `[E or 1, …]`: engines' names for gate (w1), up (w3) and down (w2)
    experts, Shared           the same names, `[1, …]`

Belongs here: what publishing and proving an adapter requires without computing with it: names, how an expert layer's
stacked tensors are split among them, and the time allowed for work on its bytes. Does not belong here: tensors
(`state`), timeouts of work without bytes (each waiting side sets its own).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Buffer, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING

from orbit_runtime.digests import PIECE_BYTES, Pieces, cut, hash_pieces, tree_digest
from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.headers import parse_header
from orbit_runtime.storage import StoredFiles
from orbit_runtime.types import AdapterFiles

if TYPE_CHECKING:
    from torch import Tensor

MODEL_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
ROTATIONS_FILE = "rotations.safetensors"
PEFT_PREFIX = "base_model.model."


def pieces_of(files: Mapping[str, Buffer]) -> dict[str, Pieces]:
    """The pieces of each file, cut as defined in `digests`; a damaged file is cut as if it held no tensors."""
    return {name: hash_pieces(_cut_file(name, data)) for name, data in files.items()}


def file_pieces(data: Buffer, *, where: str) -> Iterator[memoryview]:
    """The pieces of a file as stored. Raises ModelError if it is not a valid file."""
    view = memoryview(data).cast("B")
    header = parse_header(view, size=view.nbytes, where=where)
    sizes = [info.num_bytes for info in sorted(header.tensors.values(), key=lambda info: info.start)]
    return chain([view[: header.data_start]], cut(view[header.data_start :], sizes))


def _cut_file(name: str, data: Buffer) -> Iterable[memoryview]:
    if name != CONFIG_FILE:
        with suppress(ModelError):
            return file_pieces(data, where=name)
    return cut(data)


def files_digest(files: Mapping[str, Buffer]) -> str:
    """`tree:<hex>` over every piece of every file; see `digests`."""
    return tree_digest(pieces_of(files))


def expected_applied_digest(files: Mapping[str, Buffer], pieces: Mapping[str, Pieces] | None = None) -> str:
    """The value of `applied_digest` if a pass applied exactly these files in every layer.

    Args:
        pieces: hashes of these files from their publish; None to hash them here.
    """
    scaling = published_scaling(files)
    name = ROTATIONS_FILE if scaling is None else MODEL_FILE
    known = pieces[name] if pieces else pieces_of({name: files[name]})[name]
    # For a stored file the header is enough.
    head = files.first_piece(name) if isinstance(files, StoredFiles) else files[name]
    shapes, by_tensor = _by_tensor(name, head, known)
    return digest_applied(shapes, by_tensor, {scaling})


def published_scaling(files: Mapping[str, Buffer]) -> float | None:
    """The factor of LoRA's product under this adapter; None for OFT, which has none."""
    fields = json.loads(bytes(files[CONFIG_FILE]))
    if fields["peft_type"] == "OFT":
        return None
    divisor = math.sqrt(fields["r"]) if fields["use_rslora"] else fields["r"]
    return float(fields["lora_alpha"]) / divisor


def _by_tensor(name: str, data: Buffer, pieces: Pieces) -> tuple[dict[str, tuple[int, ...]], dict[str, Pieces]]:
    """Shapes and pieces of a file's tensors, by their names in layers. Args: data: the file, or its first piece."""
    view = memoryview(data).cast("B")
    header = parse_header(view, size=sum(piece.bytes for piece in pieces), where=name)
    left = iter(pieces)
    assert next(left).bytes == header.data_start
    shapes, found = {}, {}
    for key, info in sorted(header.tensors.items(), key=lambda item: item[1].start):
        shapes[plain_key(key)] = info.shape
        found[plain_key(key)] = tuple(islice(left, -(-info.num_bytes // PIECE_BYTES)))
    return shapes, found


def digest_applied(
    shapes: Mapping[str, Sequence[int]], pieces: Mapping[str, Pieces], scalings: Iterable[float | None]
) -> str:
    """`applied_digest` of tensors known by their pieces, by their names in layers."""
    scaled = " ".join(sorted(str(scaling) for scaling in scalings))
    return tree_digest({f"{name} {list(shapes[name])} {scaled}": each for name, each in pieces.items()})


def plain_key(key: str) -> str:
    return key.removeprefix(PEFT_PREFIX).removesuffix(".weight")


STACKED_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LAYER_NAMES = {short: name for name, short in STACKED_NAMES.items()}
_ONE_EXPERT = re.compile(r"(?P<layer>(?:.*\.)?experts)\.(?P<expert>\d+)\.(?P<leaf>[^.]+)")


def expert_file_names(module: str, kind: str, layout: str, num_experts: int) -> tuple[str, ...]:
    """Names of the tensors that make up `<module>.<kind>`, a module of experts such as `….experts.gate_proj`."""
    parent, _, leaf = module.rpartition(".")
    if layout == "PerExpert":
        return tuple(f"{parent}.{index}.{leaf}.{kind}" for index in range(num_experts))
    return (f"{parent}.{STACKED_NAMES.get(leaf, leaf)}.{kind}",)


def is_outer(layer: str, kind: str) -> bool:
    """Whether this side of a layer of experts faces the hidden state: the side that `SharedOuter` shares."""
    reads_tokens = not layer.endswith(".down_proj")
    return reads_tokens != (kind == "lora_B")


def layer_of(module: str, *, is_stacked: bool) -> tuple[str, int | None]:
    """(layer, expert) of a module as a file names it: the inverse of `expert_file_names`; expert None for all of them,
    or for a dense layer.

    Args:
        is_stacked: whether the module's tensors have an axis of experts.
    """
    if is_stacked:
        parent, _, leaf = module.rpartition(".")
        return f"{parent}.{_LAYER_NAMES.get(leaf, leaf)}", None
    found = _ONE_EXPERT.fullmatch(module)
    return (f"{found['layer']}.{found['leaf']}", int(found["expert"])) if found else (module, None)


def split_tensor(names: tuple[str, ...], tensor: Tensor) -> dict[str, Tensor]:
    """The tensor by file name: split along the experts if each has a name of its own."""
    return {names[0]: tensor} if len(names) == 1 else dict(zip(names, tensor.unbind(0), strict=True))


def join_tensors(names: tuple[str, ...], tensors: Mapping[str, Tensor]) -> Tensor:
    """The inverse of `split_tensor`."""
    import torch

    return tensors[names[0]] if len(names) == 1 else torch.stack([tensors[name] for name in names])


SLOWEST_BYTES_PER_SECOND = 50e6
"""Lower bound for moving, hashing or parsing: a tenth of what one core of a busy machine achieves."""


def seconds_for(num_bytes: float) -> float:
    """Example: 200 s for an adapter of 10 GB."""
    return num_bytes / SLOWEST_BYTES_PER_SECOND


def adapter_bytes(adapter: AdapterFiles) -> int:
    """Size of all its files; none is read for it if their pieces are known."""
    if adapter.pieces is None:
        return sum(memoryview(data).nbytes for data in adapter.files.values())
    return sum(piece.bytes for pieces in adapter.pieces.values() for piece in pieces)
