"""The ways in which a published adapter reaches a server: one real SGLang server's load call, and the medium alone.

    ORBIT_SGLANG_PYTHON=$(tools/sglang_python.sh) .venv/bin/python benchmarks/adapter_transports.py

Files are the twin. With the shipped model the load call is HTTP and SGLang's own work. Alone, a payload goes from one
thread to another: what comes as files is not digested on arrival, and the rest is, so its fair twin is `files, read and
digested`. `--only medium` needs no server.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from orbit_runtime.adapters.state import CONFIG_FILE, MODEL_FILE, ROTATIONS_FILE, files_digest
from orbit_runtime.rollout.handover import Broadcast, SharedMemory, Transport
from orbit_runtime.sglang_plugin.arrival import files_of
from orbit_runtime.types import AdapterFiles

MEASURES = (
    "orbit_runtime/rollout/handover.py", "orbit_runtime/sglang_plugin/arrival.py", "orbit_runtime/adapters/state.py",
    "orbit_runtime/adapters/ticket.py",
)  # fmt: skip
COPIES = {"the engine": (0, 1)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=256, help="payload of the medium alone")
    parser.add_argument("--only", choices=("medium", "load"), help="one half of it, as a result of its own")


def measure(options: argparse.Namespace) -> harness.Measured:
    if options.only != "medium":
        harness.need_sglang()
    megabytes = 1 if options.smallest else options.megabytes
    comparisons = []
    if options.only != "load":
        comparisons += measure_medium(megabytes, options.repetitions)
    if options.only != "medium":
        comparisons += measure_load(options.repetitions)
    print(harness.table(comparisons))
    return harness.Measured(comparisons, facts={"megabytes": megabytes}, variant=options.only or "")


def measure_medium(megabytes: int, repetitions: int) -> list[harness.Comparison]:
    files = {MODEL_FILE: os.urandom(megabytes * 2**20), ROTATIONS_FILE: b"", CONFIG_FILE: b"{}"}
    adapter = AdapterFiles(1, files, files_digest(files))
    numbers = itertools.count()
    with TemporaryDirectory() as scratch, ThreadPoolExecutor(1) as receiver:

        def by_files(*, digested: bool) -> None:
            folder = Path(scratch) / str(next(numbers))
            folder.mkdir()
            for name, content in files.items():
                (folder / name).write_bytes(content)
            found = receiver.submit(files_of, folder).result()
            assert not digested or files_digest(found) == adapter.digest
            shutil.rmtree(folder)

        def by(transport: Transport) -> Callable[[], None]:
            def send() -> None:
                folder = Path(scratch) / str(next(numbers))
                with transport.carry(adapter, folder, COPIES):
                    receiver.submit(files_of, folder).result()

            return send

        digested = ("files, read and digested", lambda: by_files(digested=True))
        memory, broadcast = SharedMemory(), Broadcast()
        name = f"{megabytes} MiB to another thread"
        found = [
            harness.compare(name, ("memory", by(memory)), digested, repetitions=repetitions),
            harness.compare(name, ("broadcast", by(broadcast)), digested, repetitions=repetitions),
            harness.compare(name, ("memory", by(memory)), ("files", lambda: by_files(digested=False)),
                            repetitions=repetitions),
        ]  # fmt: skip
        broadcast.close()
    return found


def measure_load(repetitions: int) -> list[harness.Comparison]:
    from benchmarks.sglang_rig import Chosen, started

    chosen, numbers = Chosen(), itertools.count()
    with started("LoRA", transport=chosen) as rig:
        rig.move(0, 0.02)
        adapter = rig.publish().adapter

        def load(transport: Transport | None) -> Callable[[], None]:
            def once() -> None:
                chosen.now, name = transport, f"load-{next(numbers)}"
                rig.engine.load_adapter(name, adapter)
                assert rig.engine.loaded[name].ticket.exists() == (transport is not None)
                rig.engine.unload_adapter(name)

            return once

        memory, broadcast = SharedMemory(), Broadcast()
        name = "load and unload, shipped model"
        found = [
            harness.compare(name, ("memory", load(memory)), ("files", load(None)), repetitions=repetitions),
            harness.compare(name, ("broadcast", load(broadcast)), ("files", load(None)), repetitions=repetitions),
        ]
        broadcast.close()
        assert rig.engine.replicas[0].missed == 0, "what was measured came as files"
    return found


if __name__ == "__main__":
    raise SystemExit(harness.run(__file__, __doc__, measure, add_options, repetitions=10))
