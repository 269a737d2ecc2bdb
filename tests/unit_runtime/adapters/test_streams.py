"""Adapter files as streams: the same bytes and digests as at once, and never more than a few pieces in memory."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from orbit_runtime.adapters import buffer as buffer_module
from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.buffer import AdapterBuffer, MappedPlace, shared
from orbit_runtime.adapters.files import MODEL_FILE, file_pieces, files_digest, pieces_of
from orbit_runtime.digests import PIECE_BYTES, cut, hash_pieces, tree_digest
from orbit_runtime.errors import OutOfMemoryError
from orbit_runtime.types import AdapterFiles

LARGE = PIECE_BYTES // 2 + 12_345
"""Values of which BF16 needs two pieces."""


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = {"b": (7, 11), "a": (LARGE,), "empty": (0, 4), "one": (), "c.large": (5, LARGE // 5), "d": (3, 1_000_000)}
    return {name: torch.randn(shape, generator=generator) for name, shape in sizes.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_streamed_file_is_read_by_safetensors_and_has_a_piece_for_each_part_of_a_tensor(dtype: torch.dtype) -> None:
    tensors = some_tensors()
    file = tensorfile.build(tensors, dtype)
    pieces = [bytes(each) for each in file.pieces()]
    data = b"".join(pieces)
    assert len(data) == file.size
    found = load(data)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in tensors.items())
    # What is cut as it is made, is cut alike when the file lies there.
    assert [bytes(each) for each in file_pieces(data, where="x")] == pieces
    assert max(map(len, pieces)) <= PIECE_BYTES
    header = int.from_bytes(data[:8], "little") + 8
    expected = [data[:header]]
    for name in sorted(tensors):
        start, end = json.loads(data[8:header])[name]["data_offsets"]
        expected += [data[header + at : header + min(at + PIECE_BYTES, end)] for at in range(start, end, PIECE_BYTES)]
    assert pieces == expected


def test_tensors_widened_from_a_file_have_the_digests_of_that_file() -> None:
    published = {name: tensor.bfloat16() for name, tensor in some_tensors().items()}
    data = tensorfile.dump(published, torch.bfloat16)
    widened = {name: tensor.float() for name, tensor in published.items()}
    shapes = {name: tensor.shape for name, tensor in widened.items()}
    assert (
        tensorfile.assemble(shapes, tensorfile.tensor_pieces(widened.items()))
        == pieces_of({MODEL_FILE: data})[MODEL_FILE]
    )
    widened["a"][LARGE - 1] = torch.nextafter(widened["a"][LARGE - 1], torch.tensor(9.0))
    found = tensorfile.assemble(shapes, tensorfile.tensor_pieces(widened.items()))
    assert found != pieces_of({MODEL_FILE: data})[MODEL_FILE], "what BF16 would hide shows"


def test_a_tensor_has_the_pieces_of_its_values_however_it_lies() -> None:
    given = torch.randn(300, 400, generator=torch.Generator().manual_seed(1)).bfloat16()
    laid = {"narrow": given, "wide": given.float(), "turned": given.t().contiguous().t(), "rows": given.float()[:150]}
    found = tensorfile.tensor_pieces(laid.items())
    assert found["narrow"] == found["wide"] == found["turned"]
    assert found["rows"] == hash_pieces([given[:150].contiguous().view(torch.uint8).numpy()])
    for value in (-0.0, float("nan"), 1.0 + 2.0**-20):
        other = given.float()
        other[299, 399] = value
        assert tensorfile.tensor_pieces([("x", other)])["x"] != found["wide"]
    # Rows of one tensor are not copied, whichever of them there are; others are.
    for rows in ([*given.float()], [*given.float()][7:90], [*given.float()][::2], [*given.float()][::-1]):
        found = tensorfile.tensor_pieces(enumerate(rows))
        wanted = hash_pieces([row.bfloat16().view(torch.uint8).numpy() for row in rows])
        assert tuple(piece for each in found.values() for piece in each) == wanted


def test_a_file_that_another_program_wrote_has_a_digest_too() -> None:
    """`safetensors` orders tensors by size of dtype and name, not as we do."""
    data = save({"z": torch.zeros(3, dtype=torch.bfloat16), "a": torch.ones(2)})
    (pieces,) = pieces_of({MODEL_FILE: data}).values()
    assert [piece.bytes for piece in pieces[1:]] == [8, 6]
    assert files_digest({MODEL_FILE: data[:-1]}) != files_digest({MODEL_FILE: data})


def test_the_memory_holds_files_as_they_were_written_and_gives_them_without_copying(tmp_path: Path) -> None:
    content = {"adapter_config.json": b"{}", "a": os.urandom(PIECE_BYTES + 5), "b": b"", "c": os.urandom(100_000)}
    buffer = AdapterBuffer()
    found = {name: buffer.write(name, len(data), cut(data)) for name, data in content.items()}
    assert tree_digest(found) == tree_digest({name: hash_pieces(cut(data)) for name, data in content.items()})
    files = buffer.files()
    assert files == content
    with open(f"/proc/self/fd/{buffer.descriptor}", "rb") as file:
        start, size = buffer.places["a"]
        file.seek(start)
        assert hashlib.sha256(file.read(size)).digest() == hashlib.sha256(content["a"]).digest()
    descriptor = buffer.descriptor
    adapter = AdapterFiles(1, files, tree_digest(found), found, buffer)
    assert shared(adapter) is buffer
    del buffer, adapter
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
    assert files == content, "a view holds the memory"


@pytest.mark.parametrize("sizes", [(8, 100, 3), (16, PIECE_BYTES + 4, 0, 200_000)])
def test_a_file_that_others_fill_is_hashed_as_far_as_it_is_there(sizes: tuple[int, ...]) -> None:
    buffer, content = AdapterBuffer(), os.urandom(sum(sizes))
    buffer.write("before", 10, [bytes(10)])

    def write() -> Iterator[int]:
        start, end = buffer.places["a"][0], 0
        for size in sizes:
            os.pwrite(buffer.descriptor, content[end : end + size], start + end)
            end += size
            yield end

    assert buffer.fill("a", sizes, write()) == hash_pieces(cut(content, sizes))
    assert buffer.files()["a"] == content


@pytest.mark.parametrize("advice", [buffer_module._POPULATE_WRITE, 9999], ids=["Linux 5.14", "before"])
def test_a_mapped_place_is_written_to_and_nothing_beside_it(monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    monkeypatch.setattr(buffer_module, "_POPULATE_WRITE", advice)
    size = 3_000_001
    buffer, content = AdapterBuffer(), bytearray(os.urandom(size))
    start = buffer.allot("a", size)
    os.pwrite(buffer.descriptor, content, start)
    place = MappedPlace(buffer.descriptor, start + 5001, 2_500_000)
    for begin, end in ((0, 1), (5, 5), (1_000_000, 1_100_000), (2_499_000, 2_500_000)):
        content[5001 + begin : 5001 + end] = bytes(end - begin)
        place.view(begin, end)[:] = bytes(end - begin)
    with pytest.raises(OSError, match="busy"):
        buffer.seal()
    del place
    assert buffer.files()["a"] == content


def test_a_page_that_cannot_be_had_is_an_error_of_the_writer_and_no_signal() -> None:
    buffer = AdapterBuffer()
    place = MappedPlace(buffer.descriptor, buffer.allot("a", 4 << 20), 4 << 20)
    place.view(0, 10)[:] = bytes(10)
    os.ftruncate(buffer.descriptor, 1 << 20)
    with pytest.raises(OutOfMemoryError, match="needs 4 MiB of this machine's memory, and 2 MiB could be had"):
        place.view((2 << 20) + 7, (2 << 20) + 8)


def test_memory_that_cannot_be_had_is_told_and_nothing_of_it_is_left() -> None:
    """In a process of its own: the limit cannot be taken back."""
    code = """
import os, resource, signal
from orbit_runtime.adapters.buffer import AdapterBuffer
from orbit_runtime.digests import PIECE_BYTES
from orbit_runtime.errors import OutOfMemoryError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3 * PIECE_BYTES // 2, 3 * PIECE_BYTES // 2))
before = len(os.listdir('/proc/self/fd'))
buffer = AdapterBuffer()
try:
    buffer.write('a', 2 * PIECE_BYTES, [bytes(PIECE_BYTES)] * 2)
except OutOfMemoryError as error:
    print(error.exit_code, error.message)
del buffer
print(len(os.listdir('/proc/self/fd')) - before)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [
        "79 the adapter needs 32 MiB of this machine's memory, and 24 MiB could be had: file too large",
        "0",
    ], ended.stderr
