"""A plan for people: a table of parts by phase, a stacked bar for each phase, and what follows from it.

Belongs here: layout and words. Does not belong here: any number that the plan does not hold.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orbit_runtime.observability.logs import build_console
from orbit_runtime.planner import Plan
from orbit_runtime.planner.job import gpu_names
from orbit_runtime.planner.parts import PHASES, Phase

BAR_WIDTH = 64
GROUPS = (
    # (what, the parts it holds by how their names begin, colour, letter where there is no colour)
    ("base", ("base",), "blue", "B"),
    ("adapter", ("adapter", "masters", "model export", "optimizer", "gradients"), "green", "A"),
    ("KV cache", ("KV cache",), "yellow", "K"),
    (
        "activations",
        ("activations", "layer", "logits", "dequantisation", "engine workspace"),
        "magenta",
        "X",
    ),
    ("runtime", ("runtime", "CUDA graphs", "reserve", "loading"), "bright_black", "R"),
)
GIB, MIB = 2**30, 2**20

FITS = {
    "works": "fits",
    "planned": "fits; the notes say what has not run on hardware",
    "missing": "fits, but this version cannot run it yet",
}
"""State of support → words; what is refused does not fit."""


def print_plan(made: Plan, console: Console | None = None) -> None:
    """Prints the whole plan for a person on standard output."""
    console = console or build_console(highlight=False, soft_wrap=True)
    for line in _head(made):
        console.print(line, markup=False)
    console.print()
    console.print(_table(made))
    for phase in PHASES:
        console.print(_bar(made, phase, colour=console.color_system is not None))
    console.print(_legend(colour=console.color_system is not None))
    console.print()
    for line in _tail(made):
        console.print(line, markup=False)


def _head(made: Plan) -> list[str]:
    size = made.adapter
    trained = "trained as a whole" if "masters" in made.phases["train"] else "adapter"
    experts = f", {size.experts / 1e6:,.1f} M of them with routed experts" if size.experts else ""
    copies = "one copy of the base" if made.base_copies == "Shared" else "two copies of the base"
    lines = [
        f"{made.run}: {made.model} ({made.precision}) on {made.machine}; facts: {made.source}",
        f"trainer {made.trainer}, engine {made.engine}, {copies}, micro-batch of {made.micro_batch_tokens:,} tokens, "
        f"recompute {made.recompute}",
        f"{trained}: {size.total / 1e6:,.1f} M parameters in {size.num_layers} layers{experts}",
    ]
    if made.layout.num_gpus > 1:
        lines.insert(2, f"layout: {made.layout.text()} (tensor, expert, pipeline, context, data)")
    if made.servers * made.server_gpus > 1:
        what = "process" if made.machine == "the CPU" else "GPU"
        size = f"{made.server_gpus} {what}{'' if made.server_gpus == 1 else 'es' if what == 'process' else 's'}"
        lines.insert(-1, f"servers: {made.servers} of SGLang, {size} each (replicas, tensorParallel)")
    if len(made.devices.engine) > 1 and made.server_devices:
        served = range(made.server_devices[0].start, made.server_devices[-1].stop)
        lines.insert(-1, f"devices: trainer on {gpu_names(made.devices.trainer)}, engine on {gpu_names(served)}")
    return lines


def _unit(made: Plan) -> tuple[str, int]:
    return ("GiB", GIB) if max(made.total(phase) for phase in PHASES) >= 4 * GIB else ("MiB", MIB)


def _table(made: Plan) -> Table:
    name, unit = _unit(made)
    device = "a GPU" if made.machine != "the CPU" else "of memory"
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"{name} {device}")
    for phase in PHASES:
        table.add_column(phase, justify="right", min_width=9)
    parts = list(dict.fromkeys(part for phase in PHASES for part in made.phases[phase]))
    order = [start for _, starts, _, _ in GROUPS for start in starts]
    for part in sorted(parts, key=lambda each: next((i for i, s in enumerate(order) if each.startswith(s)), 99)):
        table.add_row(part, *(_cell(made.phases[phase].get(part), unit) for phase in PHASES))
    table.add_row("total", *(_cell(made.total(phase), unit) for phase in PHASES), style="bold")
    if made.capacity is not None:
        table.add_row("there is", *(_cell(made.capacity, unit) for _ in PHASES))
    return table


def _cell(size: int | None, unit: int) -> str:
    return "" if size is None else f"{size / unit:,.2f}"


def _bar(made: Plan, phase: Phase, *, colour: bool) -> Text:
    """A bar for one phase: `|` marks the end of the device's memory; anything beyond it is drawn behind."""
    totals = [made.total(each) for each in PHASES]
    full = max(made.capacity or 0, *totals) if made.problems else made.capacity or max(totals)
    cells: list[tuple[str, str]] = []
    sofar = 0.0
    for _, starts, shade, letter in GROUPS:
        sofar += sum(size for part, size in made.phases[phase].items() if part.startswith(starts))
        cells += [("█" if colour else letter, shade)] * (round(sofar / full * BAR_WIDTH) - len(cells))
    edge = round((made.capacity or full) / full * BAR_WIDTH)
    cells += [(" ", "")] * (edge - len(cells))
    text = Text(f"{phase:8}|")
    for cell, shade in [*cells[:edge], ("|", ""), *cells[edge:]]:
        text.append(cell, style=shade if colour else "")
    if made.capacity:
        over = made.total(phase) > made.capacity
        text.append(f" {made.total(phase) / made.capacity:.0%}", style="red" if over and colour else "")
    return text


def _legend(*, colour: bool) -> Text:
    text = Text(" " * 9)
    for what, _, shade, letter in GROUPS:
        text.append(f"{'█' if colour else letter} {what}  ", style=shade if colour else "")
    return text


def _tail(made: Plan) -> list[str]:
    minutes = made.download_seconds / 60
    took = f"{minutes:.0f} min" if minutes >= 2 else f"{made.download_seconds:.0f} s"
    per = "a replica" if max(made.servers, made.layout.data if not made.servers else 1) > 1 else "in all"
    plural = "" if made.kv_sequences == 1 else "s"
    cache = f"KV cache: {made.kv_tokens:,} tokens, {made.kv_sequences} completion{plural} of full length {per}"
    lines = [
        # Nothing is sampled for demonstrations.
        *([cache] if made.phases["rollout"] else []),
        f"main memory {_size(made.host_bytes)}, disk {_size(made.disk_bytes)}, "
        f"files {_size(made.download_bytes)}: {took} at 1 GB/s",
    ]
    if made.server_memory:
        told = made.server_memory
        lines.append(
            f"each server: {told.kv_tokens:,} tokens of KV cache, {told.adapter_slots} adapter slots (versions, "
            f"preflight's, the bare base), {told.fraction:.0%} of the memory that is free when it starts"
        )
    if made.capacity:
        fullest = max(PHASES, key=made.total)
        line = f"fullest phase: {fullest}, {_room(made, fullest)}"
        if made.binding != fullest:
            line += f"; its KV cache can give way, so {made.binding} decides: {_room(made, made.binding)}"
        lines.append(line)
    lines += [f"note: {note}" for note in made.notes]
    if made.fits:
        lines.append(FITS[made.support.state])
    return lines


def _room(made: Plan, phase: Phase) -> str:
    left = (made.capacity or 0) - made.total(phase)
    return f"{_size(left)} left" if left >= 0 else f"{_size(-left)} too much"


def _size(count: int) -> str:
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / MIB:,.1f} MiB"
