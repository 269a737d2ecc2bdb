"""One publish of an adapter of which two ranks hold half each, against one copy of its bytes into the same memory.

A publish is what the run's process waits for: ranks write, and the bytes are hashed. The trainer's part of the proof is
a pass over the canary, and the digest of what it multiplied by. Memory is private memory above what the process had
before: neither the run's process nor a rank may come near the adapter's size. Processor seconds are those of all these
processes together; other programs disturb them less than the time that passes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Comparison, Measured, NotMeasured, run
from benchmarks.ranks_step import trainer_parts

MEASURES = (
    "orbit_runtime/training/megatron", "orbit_runtime/workers/ranks/group.py", "orbit_runtime/adapters",
    "orbit_runtime/digests.py",
)  # fmt: skip
CANARY = tuple(range(2, 34))
LIMIT_MIB = 64
EXPERT_MIB = 4 * 3 * 128 * (128 + 256) * 2 / 2**20
"""MiB that one more expert in each of four layers adds to the adapter."""


def build(mebibytes: int, closing: ExitStack) -> Any:
    """A trainer in two ranks with an adapter of about this size: rank 128, on as many experts as needed."""
    from orbit_runtime.adapters.config import AdapterConfig
    from orbit_runtime.training.megatron.groups import GroupSizes
    from orbit_runtime.training.megatron.rank import RankSettings
    from orbit_runtime.training.megatron.trainer import MegatronTrainer
    from orbit_runtime.workers.ranks.group import GroupSettings, start_ranks

    folder, _, settings = trainer_parts()
    sizes = GroupSizes(2, expert=2)
    targets = ("gate_proj", "up_proj", "down_proj")
    adapter = AdapterConfig(type="LoRA", targets=targets, rank=128, alpha=128.0, experts="PerExpert")
    scratch = Path(closing.enter_context(TemporaryDirectory(prefix="orbit-ranks-")))
    grow(folder, scratch / "model", experts=2 * max(4, round(mebibytes / EXPERT_MIB / 2)))
    group = GroupSettings(
        "orbit_runtime.training.megatron.rank:MegatronRank",
        {"settings": RankSettings(scratch / "model", adapter, sizes, settings)},
        sizes.world,
        environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    return MegatronTrainer(closing.enter_context(start_ranks(group, scratch / "logs")), "base")


def grow(folder: Path, out: Path, experts: int) -> None:
    """Writes the model with this many experts in each layer, copied from its own."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    known, config["num_experts"] = config["num_experts"], experts
    (out / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        before, is_expert, after = name.partition(".experts.")
        if is_expert:
            number, _, leaf = after.partition(".")
            copies = range(int(number), experts, known)
            tensors |= {f"{before}.experts.{copied}.{leaf}": value.clone() for copied in copies}
        else:
            tensors[name] = torch.cat([value] * -(-experts // known))[:experts] if "mlp.gate." in name else value
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def copy(files: list[memoryview]) -> float:
    """Seconds that one thread takes to write the files into fresh memory of the kind that publishes use."""
    start = time.perf_counter()
    descriptor = os.memfd_create("orbit-copy")
    try:
        for view in files:
            position = 0
            while position < view.nbytes:
                position += os.pwrite(descriptor, view[position:], position)
        return time.perf_counter() - start
    finally:
        os.close(descriptor)


@contextmanager
def watched(found: dict[str, int], spent: dict[str, list[float]], stage: str, *, look: bool) -> Iterator[None]:
    """Records in `spent` the processor seconds of this process and its children; with `look`, in `found` the peak
    private memory in MiB above that at the start, of this process and of any child."""
    seconds = processor_seconds()
    before, peak, done = private_memory(), dict[int, int](), threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            for pid, size in private_memory().items():
                peak[pid] = max(peak.get(pid, 0), size - before.get(pid, size))

    thread = threading.Thread(target=watch)
    if look:
        thread.start()
    try:
        yield
    finally:
        done.set()
        spent.setdefault(stage, []).append(processor_seconds() - seconds)
        if look:
            thread.join()
            own = peak.pop(os.getpid(), 0)
            for who, size in (("run", own), ("a rank", max(peak.values(), default=0))):
                found[f"{stage}, {who}"] = max(found.get(f"{stage}, {who}", 0), size >> 10)


def private_memory() -> dict[int, int]:
    """RssAnon in KiB of this process and all its descendants."""
    parents, sizes = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines())
            except OSError:
                continue
            parents[int(entry.name)] = int(fields["PPid"])
            sizes[int(entry.name)] = int(fields.get("RssAnon", "0 kB").split()[0])
    return {pid: size for pid, size in sizes.items() if is_below(pid, parents)}


def processor_seconds() -> float:
    """Processor seconds of this process and all its living descendants."""
    ticks = 0
    for pid in private_memory():
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def is_below(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()


def measure(options: argparse.Namespace) -> Measured:
    try:
        import megatron.core  # noqa: F401
        import ray  # noqa: F401
    except ImportError as error:
        raise NotMeasured(f"{error.name} is not installed: pip install 'orbit-rl[megatron,ray]'") from None
    from orbit_runtime.adapters.buffer import publishable

    sizes = (1,) if options.smallest else tuple(options.mebibytes)
    rows, memory, processor = [], {}, {}
    for mebibytes in sizes:
        with ExitStack() as closing:
            trainer = build(mebibytes, closing)
            turns: list[tuple[float, float, float]] = []
            found: dict[str, int] = {}
            spent: dict[str, list[float]] = {}
            for turn in range(1 + (1 if options.smallest else options.repetitions)):
                # The first is watched and not timed: who watches takes nearly half a core from those who work.
                with watched(found, spent, "publish", look=not turn):
                    start = time.perf_counter()
                    adapter = publishable(trainer, turn)
                    published = time.perf_counter() - start
                with watched(found, spent, "proof", look=not turn):
                    start = time.perf_counter()
                    trainer.score(CANARY)
                    scored = time.perf_counter() - start
                views = [memoryview(data).cast("B") for data in adapter.files.values()]
                size = sum(view.nbytes for view in views)
                begun = time.process_time()
                copied = copy(views)
                spent.setdefault("copy", []).append(time.process_time() - begun)
                if turn:
                    turns.append((published, scored, copied))
                del adapter, views
        memory[f"{mebibytes} MiB"] = found
        # Without the first turn, like the times.
        processor[f"{mebibytes} MiB"] = {stage: round(statistics.median(each[1:]), 3) for stage, each in spent.items()}
        publish, score, once = ([each[index] for each in turns] for index in range(3))
        both = [one + other for one, other in zip(publish, score, strict=True)]
        for name, seconds, target in (("publish", publish, None), ("publish and the trainer's proof", both, 0.5)):
            ratio = statistics.median(one / other for one, other in zip(once, seconds, strict=True))
            rows.append(
                Comparison(
                    f"{name}, {size / 2**20:.0f} MiB", "two ranks", "one copy of the bytes",
                    statistics.median(seconds), statistics.median(once), ratio, target, len(turns),
                )
            )  # fmt: skip
    return Measured(
        rows,
        {
            "private memory above, MiB": memory,
            "target of it, MiB": LIMIT_MIB,
            "processor seconds, all processes": processor,
        },
        {"model": "tiny-moe-adder INT4, LoRA of rank 128 on each of many experts", "threads of a rank": 1},
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[10, 256, 1024])


if __name__ == "__main__":
    raise SystemExit(run(__file__, __doc__, measure, repetitions=5, add_options=add_options))
