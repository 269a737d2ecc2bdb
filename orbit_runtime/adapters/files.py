"""A published adapter as its files' headers tell it: names, pieces and the digests that follow from them; no torch.

Belongs here: what who publishes and proves an adapter has to know without computing with it. Does not belong here:
tensors (`state`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Buffer, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice

from orbit_runtime.digests import PIECE_BYTES, Pieces, cut, hash_pieces, tree_digest
from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.headers import parse_header
from orbit_runtime.storage import Stored

MODEL_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
ROTATIONS_FILE = "rotations.safetensors"
PEFT_PREFIX = "base_model.model."


def pieces_of(files: Mapping[str, Buffer]) -> dict[str, Pieces]:
    """Of each file, cut as `digests` says; a damaged one as if it held no tensors."""
    return {name: hash_pieces(_cut_file(name, data)) for name, data in files.items()}


def file_pieces(data: Buffer, *, where: str) -> Iterator[memoryview]:
    """The pieces of a file as it lies there. ModelError where it is none."""
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
    """What `applied_digest` must be when a pass applied exactly these files in every layer.

    Args:
        pieces: of these files, as they were hashed when they were published; None: they are hashed here.
    """
    scaling = published_scaling(files)
    name = ROTATIONS_FILE if scaling is None else MODEL_FILE
    known = pieces[name] if pieces else pieces_of({name: files[name]})[name]
    # Of what lies in a store the header is enough.
    head = files.first_piece(name) if isinstance(files, Stored) else files[name]
    shapes, by_tensor = _by_tensor(name, head, known)
    return digest_applied(shapes, by_tensor, {scaling})


def published_scaling(files: Mapping[str, Buffer]) -> float | None:
    """What layers multiply LoRA's part by under this adapter; None: it is OFT, and they do not."""
    fields = json.loads(bytes(files[CONFIG_FILE]))
    if fields["peft_type"] == "OFT":
        return None
    divisor = math.sqrt(fields["r"]) if fields["use_rslora"] else fields["r"]
    return float(fields["lora_alpha"]) / divisor


def _by_tensor(name: str, data: Buffer, pieces: Pieces) -> tuple[dict[str, tuple[int, ...]], dict[str, Pieces]]:
    """Shapes and pieces of a file's tensors, as layers name them. Args: data: the file, or its first piece."""
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
    """`applied_digest` of tensors that are known by their pieces, under their names in layers."""
    scaled = " ".join(sorted(str(scaling) for scaling in scalings))
    return tree_digest({f"{name} {list(shapes[name])} {scaled}": each for name, each in pieces.items()})


def plain_key(key: str) -> str:
    return key.removeprefix(PEFT_PREFIX).removesuffix(".weight")
