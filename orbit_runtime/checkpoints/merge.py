"""`orbit merge`: merges adapters into their base, or several adapters into one.

Belongs here: the checks, the order, the report. Does not belong here: arithmetic (`combine`, `deltas`), the cost of a
merge (`cost`), files (`destination`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orbit_runtime.checkpoints.adapter_folder import AdapterFolder
from orbit_runtime.checkpoints.combine import CombinedAdapter, combine
from orbit_runtime.checkpoints.combined_files import CombinedFiles, write_combined
from orbit_runtime.checkpoints.convert import SHARD_BYTES, ConversionResult, Show, check_writable, prepare, write
from orbit_runtime.checkpoints.deltas import AdapterChange, find_spots
from orbit_runtime.checkpoints.rewrite import Rewrite
from orbit_runtime.checkpoints.target import WRITABLE, Target
from orbit_runtime.errors import ModelError, UnsupportedError
from orbit_runtime.model_info.checkpoint import folder_headers
from orbit_runtime.model_info.content import weights_digest
from orbit_runtime.model_info.layouts import read_linears
from orbit_runtime.model_info.quantization import parse_quantization
from orbit_runtime.policy.load import checkpoint_names


@dataclass(frozen=True, slots=True)
class NamedBase:
    """Example: `NamedBase(Path("…/tiny-adder/bf16"), "builtin://tiny-adder")`"""

    folder: Path
    name: str
    """The name as the user wrote it, for messages."""


@dataclass(frozen=True, slots=True)
class MergedBase:
    written: ConversionResult
    base_weights: str
    combined: CombinedAdapter
    modules: tuple[str, ...]
    """The base's modules that were changed; of experts in one tensor `<module>.<expert>`."""

    def to_json(self) -> dict[str, Any]:
        return {**self.written.to_json(), "base_weights": self.base_weights, "adapted_modules": list(self.modules)}


def merge_into_base(
    base: NamedBase,
    adapters: Sequence[AdapterFolder],
    weights: Sequence[float],
    folder: Path,
    target: Target,
    *,
    unchecked: bool,
    show: Show,
) -> MergedBase:
    """Writes a model that needs no adapter.

    Args:
        unchecked: also accept adapters that do not record their base, but never those that name another base.

    Raises:
        ModelError: an adapter belongs to another base, or does not fit.
        UnsupportedError: Orbit does not write the target, or it would quantise untouched modules a second time.
    """
    combined = combine(adapters, weights)
    digest = weights_digest(base.folder)
    check_base(adapters, digest, base.name, unchecked=unchecked)
    rewrite, config = prepare(base.folder, target)
    rename = checkpoint_names(base.folder, rewrite.source.tensors)
    change = AdapterChange(combined, find_spots(combined, _shapes(rewrite), rename, base.name))
    rewrite.change = change
    _check_target(rewrite, change, base.name)
    facts = {
        "kind": "merge",
        "base_weights": digest,
        "adapters": [
            {"place": each.place, "digest": each.facts.get("digest"), "weight": weight}
            for each, weight in zip(adapters, weights, strict=True)
        ],
    }
    result = write(rewrite, config, folder, facts, show=show, shard_bytes=SHARD_BYTES)
    return MergedBase(result, digest, combined, tuple(sorted(change.modules())))


def _shapes(rewrite: Rewrite) -> dict[str, tuple[int, int]]:
    """Module → shape of its weight in the base; experts in one tensor have an entry each."""
    shapes = {name: (linear.rows, linear.columns) for name, linear in rewrite.linears.items()}
    for name, (_, info) in rewrite.source.tensors.items():
        if name.endswith(".weight") and len(info.shape) == 2:
            shapes.setdefault(name.removesuffix(".weight"), (info.shape[0], info.shape[1]))
    for stack in rewrite.stacks.values():
        shapes |= dict.fromkeys(stack.experts(), (stack.rows, stack.columns))
    return shapes


def _check_target(rewrite: Rewrite, change: AdapterChange, base: str) -> None:
    target, changed = rewrite.target, change.modules()
    if target.layout == "BF16":
        return
    check_writable(stack for stack in rewrite.stacks.values() if changed.intersection(stack.experts()))
    for linear in rewrite.linears.values():
        if linear.layout != target.layout and linear.module not in changed:
            raise UnsupportedError(
                f"{linear.module} is {linear.layout} and no adapter changes it: writing {target.layout} would "
                "quantise it a second time",
                where=base,
                fix="merge to BF16, or to the base's own format",
            )


def base_target(base: Path, precision: str) -> Target | None:
    """The base's own layout and group if it is already packed in `precision`; otherwise None.

    Raises:
        UnsupportedError: it is a layout that only its authors write, such as DeepSeek-V4's.
    """
    headers = folder_headers(base)
    quant = parse_quantization(headers.config, where=f"{base}/config.json", tensors=headers.infos())
    if quant.name != precision or precision == "BF16":
        return None
    linears = read_linears(headers.tensors, quant, config=f"{base}/config.json")
    main = next((linear for linear in linears.values() if linear.layout == (quant.layout or quant.name)), None)
    if main is not None and main.layout not in WRITABLE:
        raise UnsupportedError(
            f"{main.module} is {main.layout}, which Orbit reads but does not write",
            where=str(base),
            fix="merge to BF16 (--precision BF16), or serve base and adapter side by side",
        )
    return Target(main.layout, main.group) if main else None


def check_base(adapters: Sequence[AdapterFolder], digest: str, base: str, *, unchecked: bool) -> None:
    """Raises `ModelError` for an adapter that was trained on other weights, or does not record its base."""
    for adapter in adapters:
        known = adapter.base_weights
        if known is None and not unchecked:
            raise ModelError(
                "the adapter does not say which base it was trained on",
                where=adapter.place,
                fix="merge it with --unchecked-base if you are sure",
            )
        if known is not None and known != digest:
            raise ModelError(
                f"the adapter was trained on another base: its weights are {known[:19]}…, these are {digest[:19]}…",
                where=adapter.place,
                fix=f"name the base that it was trained on; {base} is another",
            )


def merge_adapters(adapters: Sequence[AdapterFolder], weights: Sequence[float], folder: Path) -> CombinedFiles:
    """Writes one adapter with the combined effect of all of them.

    Raises:
        ModelError: the adapters were trained on different bases.
        OutputError: the folder is not empty.
    """
    bases = {adapter.base_weights for adapter in adapters} - {None}
    if len(bases) > 1:
        raise ModelError(
            "the adapters were trained on different bases",
            where=", ".join(adapter.place for adapter in adapters),
            fix="combine adapters of one base",
        )
    return write_combined(adapters, weights, next(iter(bases), None), folder)


def combined_json(made: CombinedFiles, folder: Path) -> dict[str, Any]:
    return {"folder": str(folder), **asdict(made)}
