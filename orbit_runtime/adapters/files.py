"""A published adapter as described by its files' headers: names, pieces and the resulting digests; no torch.

Belongs here: what publishing and proving an adapter requires without computing with it. Does not belong here:
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
    head = files.first_piece(name) if isinstance(files, Stored) else files[name]
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
