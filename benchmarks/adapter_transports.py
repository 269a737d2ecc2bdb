"""The ways a published adapter reaches a server: the load call of one real SGLang server, and the medium alone.

    ORBIT_SGLANG_PYTHON=$(tools/sglang_python.sh) .venv/bin/python benchmarks/adapter_transports.py

Files are the baseline. With the shipped model the load call is HTTP and SGLang's own work. For the medium alone, an
adapter in the trainer's memory is passed to another process, which touches every page of it; nothing is hashed on
arrival, with either medium. `--only medium` needs no server.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy
import torch

from benchmarks import harness
from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.buffer import AdapterBuffer
from orbit_runtime.adapters.files import CONFIG_FILE, MODEL_FILE, ROTATIONS_FILE
from orbit_runtime.rollout.transport import Transport, shared_memory
from orbit_runtime.sglang_plugin.adapter_loading import files_of
from orbit_runtime.types import AdapterFiles, AdapterManifest

MEASURES = (
    "orbit_runtime/rollout/transport.py",
    "orbit_runtime/sglang_plugin/adapter_loading.py",
    "orbit_runtime/adapters/state.py",
    "orbit_runtime/adapters/ticket.py",
)
COPIES = ("the engine",)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 64, 1024], help="adapters of the medium alone")
    parser.add_argument("--only", choices=("medium", "load"), help="one half of it, as a result of its own")


def measure(options: argparse.Namespace) -> harness.Measured:
    if options.only != "medium":
        harness.need_sglang()
    sizes = [1] if options.smallest else options.megabytes
    comparisons = []
    if options.only != "load":
        comparisons += [measure_medium(size, options.repetitions) for size in sizes]
    if options.only != "medium":
        comparisons.append(measure_load(options.repetitions))
    print(harness.table(comparisons))
    return harness.Measured(comparisons, facts={"megabytes": sizes}, variant=options.only or "")


def measure_medium(megabytes: int, repetitions: int) -> harness.Comparison:
    adapter = an_adapter(megabytes)
    numbers = itertools.count()
    spawn = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as scratch, ProcessPoolExecutor(1, spawn) as receiver:

        def by_files() -> None:
            folder = Path(scratch) / str(next(numbers))
            folder.mkdir()
            for name, content in adapter.files.items():
                (folder / name).write_bytes(content)
            assert receiver.submit(take_files, folder).result() == megabytes
            shutil.rmtree(folder)

        def by_memory() -> None:
            folder = Path(scratch) / str(next(numbers))
            with shared_memory(adapter, folder, COPIES):
                assert receiver.submit(take_files, folder).result() == megabytes

        name = f"{megabytes} MiB to another process"
        return harness.compare(name, ("memory", by_memory), ("files", by_files), repetitions=repetitions, target=1.5)


def an_adapter(megabytes: int) -> AdapterFiles:
    """An adapter as a trainer publishes it: BF16 tensors of 8 MiB, in the memory that they were written to."""
    values = torch.zeros(4 << 20, dtype=torch.bfloat16)
    values.view(torch.int16).random_()
    count = -(-megabytes // 8)
    tensors = {f"layer.{number}.weight": values[: megabytes * 2**19 // count] for number in range(count)}
    buffer, file = AdapterBuffer(), tensorfile.build(tensors, torch.bfloat16)
    manifest = AdapterManifest({
        CONFIG_FILE: buffer.write(CONFIG_FILE, 2, [b"{}"]),
        MODEL_FILE: buffer.write(MODEL_FILE, file.size, file.pieces()),
        ROTATIONS_FILE: buffer.write(ROTATIONS_FILE, 0, []),
    })  # fmt: skip
    return AdapterFiles(1, buffer.files(), manifest.digest, manifest.files, buffer)


def take_files(folder: Path) -> int:
    """In the receiving process: touches every page, like a server that copies tensors into its slots."""
    files = files_of(folder)
    # One byte of each page, in memory that was not read before.
    assert sum(int(numpy.frombuffer(data, dtype=numpy.uint8)[::4096].sum(dtype=numpy.int64)) for data in files.values())
    return sum(memoryview(data).nbytes for data in files.values()) >> 20


def measure_load(repetitions: int) -> harness.Comparison:
    from benchmarks.sglang_rig import Chosen, started
    from orbit_runtime.rollout.transport import FolderMailbox

    chosen, numbers = Chosen(), itertools.count()
    with started("LoRA", transport=chosen) as rig:
        rig.move(0, 0.02)
        adapter, desk = rig.publish().adapter, rig.engine.desk
        assert isinstance(desk, FolderMailbox)

        def load(transport: Transport | None) -> Callable[[], None]:
            def once() -> None:
                chosen.now, name = transport, f"load-{next(numbers)}"
                rig.engine.load_adapter(name, adapter)
                assert desk.ticket(name).exists() == (transport is not None)
                rig.engine.unload_adapter(name)

            return once

        found = harness.compare(
            "load and unload, shipped model", ("memory", load(shared_memory)), ("files", load(None)),
            repetitions=repetitions,
        )  # fmt: skip
        assert rig.engine.replicas[0].missed == 0, "what was measured came as files"
    return found


if __name__ == "__main__":
    raise SystemExit(harness.run(__file__, __doc__, measure, add_options, repetitions=10))
