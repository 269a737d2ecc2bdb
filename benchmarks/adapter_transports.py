"""The ways in which a published adapter reaches a server: one real SGLang server's load call, and the medium alone.

    ORBIT_SGLANG_PYTHON=$(tools/sglang_python.sh) .venv/bin/python benchmarks/adapter_transports.py

Files are the twin. With the shipped model the load call is HTTP and SGLang's own work. Alone, a payload goes from one
thread to another: what comes as files is not digested on arrival, and the rest is, so its fair twin is `files, read and
digested`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import harness

from orbit_runtime.adapters.state import CONFIG_FILE, MODEL_FILE, ROTATIONS_FILE, files_digest
from orbit_runtime.rollout.handover import Broadcast, SharedMemory, Transport
from orbit_runtime.rollout.sglang_server import PYTHON_VARIABLE
from orbit_runtime.sglang_plugin.arrival import files_of
from orbit_runtime.types import AdapterFiles

COPIES = {"the engine": (0, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the JSON file")
    parser.add_argument("--repetitions", type=int, default=10, help="turns that are counted")
    parser.add_argument("--megabytes", type=int, default=256, help="payload of the medium alone")
    asked = parser.parse_args()
    comparisons = measure_medium(asked.megabytes, asked.repetitions)
    if os.environ.get(PYTHON_VARIABLE) or importlib.util.find_spec("sglang"):
        comparisons += measure_load(asked.repetitions)
    else:
        print(f"the load call is not measured: {PYTHON_VARIABLE} is not set, and SGLang is not installed here")
    print(harness.table(comparisons))
    harness.save("adapter_transports", comparisons, {"megabytes": asked.megabytes}, asked.out)
    return 0


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
    from sglang_rig import Chosen, started

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
    raise SystemExit(main())
