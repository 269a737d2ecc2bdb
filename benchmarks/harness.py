"""Measure A against B fairly in one process: alternate them, compare medians, print a table, write JSON.

A program is a module with `MEASURES`, the paths whose code it measures, that ends in `raise SystemExit(run(...))`.

Belongs here: timing, what this machine could do at best, writing results. Does not belong here: what is measured (one
program each).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from math import ceil, inf, isnan, prod
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NOT_MEASURED, REFUSED = 3, 4
"""Exit statuses of a program, see `run`."""
REAL_MODEL = "ORBIT_REAL_MODEL"


class NotMeasured(Exception):
    """The measurement did not happen; the message says why, and what it needs."""


@dataclass(frozen=True)
class Comparison:
    """Times in seconds, one per repetition, A and B taking turns. `ratio` is B / A: above 1, A is faster."""

    name: str
    a: str
    b: str
    median_a: float
    median_b: float
    ratio: float
    """Median over repetitions of B's time / A's time in the same turn: disturbances of both cancel out."""
    target: float | None
    repetitions: int
    least: tuple[float, float] | None = None
    """Seconds that the useful work of A and of B takes at the best rates measured in this run, see `pass_seconds`."""

    @property
    def shares(self) -> tuple[float, float] | None:
        """What A and B reach of what is possible here: 1 would be nothing but the useful work, at the best rates."""
        return self.least and (self.least[0] / self.median_a, self.least[1] / self.median_b)


@dataclass(frozen=True)
class Measured:
    """One program's measurements. Without comparisons or figures there is no result."""

    comparisons: Sequence[Comparison] = ()
    figures: Mapping[str, object] = field(default_factory=dict)
    """Other measurements, by name: a number, or a mapping or list of numbers that is not empty."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """The conditions: sizes, versions, targets."""
    refused: str = ""
    """What is wrong with the measurements, if a bound is a promise and not a target for speed."""
    variant: str = ""
    """Part of the result's name if a program has several results: the card."""


def compare(
    name: str,
    a: tuple[str, Callable[[], object]],
    b: tuple[str, Callable[[], object]],
    *,
    repetitions: int = 15,
    calls: int = 1,
    target: float | None = None,
    least: tuple[float, float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Times `calls` calls of A, then of B, repeatedly; two warm-up turns are not counted."""
    times_a, times_b = [], []
    for turn in range(repetitions + 2):
        # The order alternates, so that neither always runs on the caches that the other left.
        pair = ((times_a, a[1]), (times_b, b[1]))
        for times, function in pair if turn % 2 else reversed(pair):
            start = clock()
            for _ in range(calls):
                function()
            times.append((clock() - start) / calls)
    times_a, times_b = times_a[2:], times_b[2:]
    ratio = statistics.median(y / x for x, y in zip(times_a, times_b, strict=True))
    return Comparison(
        name, a[0], b[0], statistics.median(times_a), statistics.median(times_b), ratio, target, repetitions, least
    )


def table(comparisons: list[Comparison]) -> str:
    """Shares are those of what is possible here, of A and of B."""
    lines = [f"{'what':<44} {'A ms':>10} {'B ms':>10} {'B/A':>7} {'target':>7} {'A share':>7} {'B share':>7}  A vs B"]
    for row in comparisons:
        target = "" if row.target is None else f"{row.target:.2f}"
        shares = "".join(f" {share:>7.3f}" for share in row.shares) if row.shares else " " * 16
        times = f"{row.median_a * 1e3:>10.3f} {row.median_b * 1e3:>10.3f} {row.ratio:>7.2f} {target:>7}"
        lines.append(f"{row.name:<44} {times}{shares}  {row.a} vs {row.b}")
    return "\n".join(lines)


MEASURED_ROWS = 2048
"""A product is taken to have the rate of one with the next power of two of rows, and with so many at most."""
RATES: dict[str, float] = {}
"""What this run measured as the best: GFLOP/s by product, GB/s of copying. Part of the result."""


def pass_seconds(folder: Path, rows: float, head_rows: float) -> float:
    """The least seconds of a forward pass of this model: its linears alone, each at the best rate of its shape here.

    Attention, norms and adapters count as nothing. A pass that also computes the gradient of its input, as training on
    a frozen base does, has twice the work.

    Args:
        rows: tokens of the pass.
        head_rows: tokens whose next token is computed.
    """
    from orbit_runtime.model_info.checkpoint import folder_facts

    facts = folder_facts(folder)
    architecture, roles = facts.architecture, {each.weight.role for each in facts.weights}
    # Without an output layer of its own, a model uses the embedding as one.
    head = "head" if "head" in roles else "embedding"
    seconds = 0.0
    for stored in facts.weights:
        weight = stored.weight
        if weight.role == head:
            seconds += product_seconds(head_rows, weight.shape, stored.num_bytes)
        elif weight.is_linear and weight.role not in ("mtp", "vision"):
            share = architecture.experts_per_token / weight.count if weight.role == "routed_expert" else 1.0
            each = product_seconds(rows * share, weight.shape, stored.num_bytes // weight.count)
            seconds += each * weight.count
    return seconds


def product_seconds(rows: float, shape: Sequence[int], num_bytes: int) -> float:
    """The least seconds of `rows` times a weight `[out, in]`: those of the product, or of reading the weight's bytes if
    that takes longer."""
    measured = min(MEASURED_ROWS, 1 << max(0, ceil(rows) - 1).bit_length())
    per_second = 2 * measured * prod(shape) / _fastest_product(measured, *shape)
    return max(2 * rows * prod(shape) / per_second, num_bytes / _copied_per_second())


@cache
def _fastest_product(rows: int, outputs: int, inputs: int) -> float:
    """Seconds in fp32, in BF16, or in BF16 with a weight that the library has ordered beforehand."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    calls: list[Callable[[], object]] = []
    for dtype in (torch.float32, torch.bfloat16):
        x, w = (torch.randn(size, inputs, device=device).to(dtype) for size in (rows, outputs))
        calls.append(lambda x=x, w=w: torch.nn.functional.linear(x, w))
    if device == "cpu" and torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(w, rows)
        calls.append(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    seconds = min(_fastest(call) for call in calls)
    RATES[f"[{rows} x {inputs}] . [{inputs} x {outputs}], GFLOP/s"] = 2e-9 * rows * inputs * outputs / seconds
    return seconds


@cache
def _copied_per_second() -> float:
    """Bytes that are copied from memory to memory in a second."""
    import torch

    source = torch.ones(2**28, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
    target = torch.empty_like(source)
    rate = source.nbytes / _fastest(lambda: target.copy_(source))
    RATES["copied, GB/s"] = 1e-9 * rate
    return rate


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of one call in the fastest of five turns of at least 10 ms."""
    import torch

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    with torch.no_grad():
        seconds(1)
        calls = max(1, round(0.01 / seconds(1)))
        return min(seconds(calls) for _ in range(5))


def save(program: Path, measured: Measured, options: argparse.Namespace, origin: Mapping[str, object]) -> Path:
    """Writes `<options.out>/<program>.json`, whole or not at all; raises NotMeasured if there is nothing to report."""
    from orbit_runtime.sides.machine import rounding_facts

    check_measured(measured)
    name = "_".join(filter(None, (program.stem, measured.variant)))
    content = {
        "name": name,
        "comparisons": [asdict(row) for row in measured.comparisons],
        "figures": dict(measured.figures),
        "facts": dict(measured.facts),
        "rates": RATES,
        "machine": {
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
            "processor": rounding_facts()["processor"],
            "python": platform.python_version(),
        },
        "smallest": options.smallest,
        **origin,
    }
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    path: Path = options.out / f"{name}.json"
    # Renamed at the end: if this process is killed before, the previous result remains.
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
    return path


def check_measured(measured: Measured) -> None:
    """Raises NotMeasured if there is neither a comparison nor a figure, or if one of them has no usable number."""
    if not measured.comparisons and not measured.figures:
        raise NotMeasured("the program ended without a comparison and without a figure")
    wrong = [row.name for row in measured.comparisons if not (0 < row.median_a < inf and 0 < row.median_b < inf)]
    wrong += [name for name, value in measured.figures.items() if not _is_measured(value)]
    if wrong:
        raise NotMeasured(f"nothing, or no number, was measured for: {', '.join(wrong)}")


def _is_measured(value: object) -> bool:
    """A mapping or a list must not be empty; NaN is the mean of nothing."""
    if isinstance(value, float):
        return not isnan(value)
    if isinstance(value, Mapping):
        return bool(value) and not any(isinstance(each, float) and isnan(each) for each in value.values())
    return bool(value) if isinstance(value, Sequence) else True


def measured_on(root: Path = ROOT) -> dict[str, object]:
    """The commit that is checked out, and whether tracked files differ from it; both None without a git checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()

    try:
        # Results are excluded: those that the previous benchmark wrote do not change what is measured.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks/results")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def stolen_seconds() -> float:
    """CPU seconds that this machine's host has given to others since the machine started; 0 if unknown."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0].split()
    except OSError:
        return 0.0
    return int(first[8]) / os.sysconf("SC_CLK_TCK")


def anonymous_bytes() -> int:
    """Bytes of this process's memory that are not backed by a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


class PeakMemory:
    """Context that samples, every half millisecond, this process's memory that is not backed by a file."""

    above: int
    """After the context: the peak, in bytes above those at its beginning."""

    def __enter__(self) -> Self:
        self._before, self._most, self._ended = anonymous_bytes(), 0, threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()
        self.above = max(self._most, anonymous_bytes()) - self._before

    def _watch(self) -> None:
        while not self._ended.wait(0.0005):
            self._most = max(self._most, anonymous_bytes())


def need_packages(*names: str, install: str) -> None:
    """Raises NotMeasured, with the way to install them, if one of these packages is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise NotMeasured(f"{', '.join(missing)} not installed here; {install}")


def add_model_option(parser: argparse.ArgumentParser) -> None:
    about = f"real: a pretrained model of 135 million parameters, whose folder {REAL_MODEL} names"
    parser.add_argument("--model", choices=("tiny", "real"), default="tiny", help=about)


def real_model() -> Path:
    """Raises NotMeasured if nothing says where it is."""
    if not (found := os.environ.get(REAL_MODEL)):
        raise NotMeasured(f"{REAL_MODEL} is not set; `make -s real-model` prints its value")
    return Path(found)


def need_sglang() -> None:
    from orbit_runtime.workers.servers.process import PYTHON_VARIABLE

    if not os.environ.get(PYTHON_VARIABLE) and importlib.util.find_spec("sglang") is None:
        raise NotMeasured(
            f"{PYTHON_VARIABLE} is not set, and SGLang is not installed here; `tools/sglang_python.sh` prints its value"
        )


def run(
    program: str,
    about: str | None,
    measure: Callable[[argparse.Namespace], Measured],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda _: None,
    *,
    repetitions: int = 15,
) -> int:
    """The whole of a benchmark's `main`: options, measuring, the result's file. Returns the exit status.

    0: measured and written. `REFUSED`: measured and written, but the result is wrong. `NOT_MEASURED`: nothing was
    written, and standard error says why. Any other error ends the program with a traceback and nothing written.

    Args:
        program: `__file__` of the benchmark; its name is the result's.
        about: the benchmark's docstring.
        measure: takes the options `out`, `repetitions`, `smallest` and what `add_options` adds.
        repetitions: default number of counted turns; with `--smallest` it is one.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument("--repetitions", type=int, default=repetitions, help="turns that are counted")
    parser.add_argument(
        "--smallest", action="store_true", help="everything as small as it gets: shows that it runs, measures nothing"
    )
    add_options(parser)
    options = parser.parse_args()
    if options.smallest:
        options.repetitions = 1
        if options.out.resolve() == RESULTS:
            parser.error("--smallest tells nothing of speed: give --out another folder than that of the results")
    # Before measuring: a commit made meanwhile is not what was measured.
    origin = measured_on()
    try:
        measured = measure(options)
        print(save(Path(program), measured, options, origin))
    except NotMeasured as error:
        print(f"{Path(program).stem}: not measured: {error}", file=sys.stderr)
        return NOT_MEASURED
    if measured.refused:
        print(f"{Path(program).stem}: {measured.refused}", file=sys.stderr)
        return REFUSED
    return 0
