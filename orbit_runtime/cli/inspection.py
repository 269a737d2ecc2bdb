"""`orbit inspect`: prints what a checkpoint, an adapter or a shipped card holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from orbit_runtime.cli.output import AsJson, format_bytes, format_json, format_table
from orbit_runtime.errors import ModelError, UsageError

if TYPE_CHECKING:
    from orbit_runtime.checkpoints.inspection import Inspection, ModuleGroup


def inspect(
    uri: Annotated[
        str,
        typer.Argument(metavar="URI", help="A model's folder or address, an adapter's folder, or hf:// of a card."),
    ],
    precision: Annotated[
        str, typer.Option(metavar="FORMAT", help="Variant of a builtin:// model, such as NVFP4.")
    ] = "Auto",
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint or an adapter holds. Also what Orbit would do with it; reads headers only.

    \f
    Raises:
        ModelError: (66) there is no model, or it is damaged.
    """
    found = _inspect(uri, precision)
    if as_json:
        print(format_json(found if isinstance(found, dict) else found.to_json()))
    elif isinstance(found, dict):
        print(format_table(("field", "value"), [(name, _text(value)) for name, value in found.items()]))
    else:
        print(format_inspection(found))


def _inspect(uri: str, precision: str) -> Inspection | dict[str, Any]:
    from orbit_runtime.checkpoints.adapter_folder import (
        adapter_address,
        describe_adapter,
        is_adapter,
        read_adapter,
        split_address,
    )
    from orbit_runtime.checkpoints.inspection import inspect_facts, inspect_headers
    from orbit_runtime.cli.addresses import local_folder
    from orbit_runtime.model_info.cards import find_card_facts, repositories
    from orbit_runtime.model_info.checkpoint import folder_headers
    from orbit_runtime.model_info.remote_checkpoint import store_headers
    from orbit_runtime.model_info.settings import check_folder
    from orbit_runtime.storage import open_store

    if uri.startswith("hf://"):
        facts = find_card_facts(uri)
        if facts is None:
            raise ModelError(
                "no shipped card knows this model",
                where=uri,
                fix=f"download it and name its folder; cards: {', '.join(sorted(repositories()))}",
            )
        return inspect_facts(facts)
    if split_address(uri)[1] and (found := adapter_address(uri)):
        uri = found[0]
    folder = local_folder(uri, precision=precision, option="--precision")
    if folder is not None:
        check_folder(folder, "correct the path")
    if folder is not None and (folder / "run.json").is_file():
        raise UsageError(
            "this is a run",
            where=str(folder),
            fix=f"name one of its adapters: {folder}/adapters/policy-v…",
        )
    if folder is not None and not (folder / "adapter_config.json").is_file():
        return inspect_headers(folder_headers(folder))
    store = open_store(str(folder) if folder is not None else uri, writable=False)
    return describe_adapter(read_adapter(store)) if is_adapter(store) else inspect_headers(store_headers(store))


def format_inspection(found: Inspection) -> str:
    """The groups as a table, then the verdict."""
    head = [
        ("model", found.place),
        ("family", found.family),
        ("precision", found.precision),
        ("size", f"{format_bytes(found.num_bytes)}, {found.parameters / 1e9:,.3f} G parameters, {found.tensors} tensors"
                 f" in {found.files} file{'s' if found.files != 1 else ''}"),
    ]  # fmt: skip
    lines = [f"{name:<10} {value}" for name, value in head]
    groups = sorted(found.groups, key=lambda group: -group.num_bytes)
    header = ("modules", "format", "count", "shape", "size", "bits")
    lines += ["", format_table(header, [_row(group) for group in groups]), ""]
    if found.refusal:
        lines.append(f"refused: {found.refusal}")
    if found.targets:
        lines.append(f"adapter.targets by default: {', '.join(found.targets)}")
    lines += found.special
    for verdict in found.verdicts:
        reason = f": {'; '.join(verdict.reasons)}" if verdict.reasons else ""
        lines.append(f"{verdict.adapter} with {verdict.trainer} and {verdict.engine}: {verdict.state}{reason}")
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join(lines)


def _row(group: ModuleGroup) -> tuple[str, ...]:
    form = group.format if group.layout in ("", group.format) else f"{group.format} ({group.layout})"
    if group.group_size:
        form += f" /{group.group_size}"
    bits = f"{group.num_bytes * 8 / group.parameters:.2f}" if group.parameters else "-"
    return (group.modules, form, str(group.count), "x".join(map(str, group.shape)) or "-",
            format_bytes(group.num_bytes), bits)  # fmt: skip


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} ({count})" for name, count in value.items())
    return "-" if value is None else str(value)
