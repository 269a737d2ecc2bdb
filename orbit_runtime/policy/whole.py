"""A model whose own weights are trained: fp32 masters of all of them, and the BF16 rounding that passes multiply by.

    master     fp32, updated by the optimiser
    applied    the master rounded to BF16, in the compute dtype of passes: what a checkpoint of it would hold
    gradient   fp32, of the applied weights, passed straight through the rounding

Bytes per parameter on a GPU: 2 applied, 4 master, 8 for AdamW's moments, 4 gradient; on the CPU 4 applied.

Belongs here: loading such a model, its masters, writing its weights to files. Does not belong here: optimisers, the
other files of a model's folder (`loop`), models with a frozen base (`load`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orbit_runtime.adapters.config import AdapterConfig, InjectReport, ReportRow
from orbit_runtime.adapters.inject import InjectedAdapter
from orbit_runtime.adapters.layer import Selection
from orbit_runtime.adapters.masters import Masters
from orbit_runtime.adapters.tensorfile import build
from orbit_runtime.digests import cut
from orbit_runtime.errors import ManifestError, ModelError, UnsupportedError
from orbit_runtime.model_info.checkpoint import read_config
from orbit_runtime.model_info.quantization import parse_quantization
from orbit_runtime.policy.attention import Kernel
from orbit_runtime.policy.families import DENSE, Family, find_family
from orbit_runtime.policy.families.published import published_family
from orbit_runtime.policy.load import build_model
from orbit_runtime.policy.model import Policy
from orbit_runtime.policy.modules import keep_stream_fp32
from orbit_runtime.policy.reader import CheckpointReader
from orbit_runtime.types import AdapterManifest, AdapterSink

CONFIG = AdapterConfig("Full", ())
FIELD = "spec.adapter.type"
SHARD_BYTES = 5 * 10**9
"""Maximum file size, as Hugging Face's writers use; a larger tensor has a file of its own."""
INDEX_FILE = "model.safetensors.index.json"


class WholeMasters:
    """The masters of every weight: the counterpart of `adapters.masters.Masters` for a whole model."""

    config = CONFIG

    def __init__(self, applied: Mapping[str, nn.Parameter]) -> None:
        """Args: applied: by name in the checkpoint's files, with the values at the start of training."""
        self.applied = dict(sorted(applied.items()))
        self.parameters = {name: nn.Parameter(weight.detach().float().clone()) for name, weight in self.applied.items()}
        for name, weight in self.applied.items():
            weight.requires_grad_(True)
            weight.register_post_accumulate_grad_hook(partial(_hand_over, self.parameters[name]))

    def series_error(self) -> float:
        return 0.0

    def after_update(self) -> None:
        """Makes passes multiply by the rounded current masters."""
        with torch.no_grad():
            for name, weight in self.applied.items():
                weight.copy_(self.parameters[name].bfloat16())

    def published(self) -> dict[str, Tensor]:
        """The masters, under their names in files; they are rounded when written."""
        return {name: master.detach() for name, master in self.parameters.items()}


def _hand_over(master: nn.Parameter, applied: Tensor) -> None:
    """Moves a pass's gradient to the master; several are summed in fp32, whatever the compute dtype."""
    assert applied.grad is not None
    gradient, applied.grad = applied.grad.float(), None
    if master.grad is None:
        master.grad = gradient
    else:
        master.grad += gradient


def write_model(masters: WholeMasters, sink: AdapterSink, shard_bytes: int = SHARD_BYTES) -> AdapterManifest:
    """BF16 safetensors under Hugging Face's tensor names, with an index if there are several files."""
    shards = [*_shards(masters, shard_bytes)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    found = {}
    for name, tensors in zip(names, shards, strict=True):
        file = build(tensors, torch.bfloat16)
        found[name] = sink.write(name, file.size, file.pieces())
    if len(shards) > 1:
        index = _index(dict(zip(names, shards, strict=True)))
        found[INDEX_FILE] = sink.write(INDEX_FILE, len(index), cut(index))
    return AdapterManifest(found)


def _shards(masters: WholeMasters, shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in masters.published().items():
        if shard and size + 2 * tensor.numel() > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += 2 * tensor.numel()
    yield shard


def _index(shards: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    total = sum(2 * tensor.numel() for tensors in shards.values() for tensor in tensors.values())
    places = {name: file for file, tensors in shards.items() for name in tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True).encode()


def load_whole(
    folder: Path,
    *,
    precision: str = "Auto",
    device: torch.device | str = "cpu",
    compute_dtype: torch.dtype = torch.float32,
    kernel: Kernel = "SDPA",
    longest: int | None = None,
    announce: Callable[[InjectReport], None] | None = None,
) -> Policy:
    """Loads a model of which every weight is trained.

    Args: as for `load.load_policy`.

    Raises:
        ModelError: something is missing, broken, or unknown in the folder.
        ManifestError: `precision` differs from the checkpoint's.
        UnsupportedError: it has packed weights or experts, or the architecture requires something that Orbit does not
            support.
    """
    device = torch.device(device)
    raw = read_config(folder)
    family = find_family(raw.get("model_type"))
    reader = CheckpointReader(folder, device)
    quant = parse_quantization(raw, where=str(folder / "config.json"), tensors=reader.headers())
    if quant.name != "BF16":
        raise UnsupportedError(
            f"the checkpoint is {quant.name}: packed weights are frozen and cannot be trained",
            where=FIELD,
            fix="name a BF16 checkpoint in spec.model, or train an adapter (adapter.type: LoRA)",
        )
    if precision not in ("Auto", "BF16"):
        raise ManifestError(
            f"the manifest says {precision}, the checkpoint is BF16", where="spec.model.precision", fix="write BF16"
        )
    if family.experts is not None or family.special_linears:
        raise UnsupportedError(
            f"this version trains the whole of dense models only, not of {raw.get('model_type')}",
            where=FIELD,
            fix="train an adapter (adapter.type: LoRA)",
        )
    model, mode = build_model(folder, raw, family, longest)
    if family is DENSE:
        family = published_family(model, reader.tensors, mode.uncalled)
    applied = _fill(model, reader, family, compute_dtype)
    reader.check_all_used(family.left_out)
    model.eval()
    model.to(device)
    keep_stream_fp32(model, compute_dtype)
    masters = WholeMasters(applied)
    report = replace(_report(masters), passes=mode.said)
    if announce is not None:
        announce(report)
    nothing = InjectedAdapter(CONFIG, report, Selection(compute_dtype), {}, Masters(CONFIG, {}, {}, {}))
    return Policy(
        model,
        nothing,
        device,
        compute_dtype,
        model.get_output_embeddings().out_features,
        quant.name,
        kernel,
        whole=masters,  # type: ignore[arg-type]
        mode=mode,
    )


def _fill(
    model: nn.Module, reader: CheckpointReader, family: Family, compute_dtype: torch.dtype
) -> dict[str, nn.Parameter]:
    """Gives every module its weights, by their published names; a head tied to the embedding uses the embedding's
    weight. Returns them under the model's own names, which it is written with."""
    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    applied: dict[str, nn.Parameter] = {}
    for owner, child, name, empty in list(_weights(model)):
        if is_tied and owner is head and child == "weight":
            continue
        value = reader.read(family.checkpoint_name(name))
        if value.shape != empty.shape or not value.is_floating_point():
            raise ModelError(
                f"{name} is {value.dtype} {list(value.shape)}, config.json says {list(empty.shape)}",
                where=str(reader.folder),
                fix="config.json and the weights belong to different models: copy or download the model again",
            )
        applied[name] = nn.Parameter(value.bfloat16().to(compute_dtype))
        owner.register_parameter(child, applied[name])
    if is_tied:
        _tie(embedding, head, reader)
    return applied


def _weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, Tensor]]:
    for prefix, module in model.named_modules():
        for child, empty in module.named_parameters(recurse=False):
            yield module, child, f"{prefix}.{child}".removeprefix("."), empty


def _tie(embedding: nn.Module, head: nn.Module, reader: CheckpointReader) -> None:
    """Raises ModelError if the checkpoint holds another head beside the tied one."""
    if reader.has("lm_head.weight") and not torch.equal(
        reader.read("lm_head.weight").to(embedding.weight), embedding.weight
    ):  # type: ignore[arg-type]
        raise ModelError(
            "config.json ties the output layer to the embedding, and the checkpoint holds another one",
            where=str(reader.folder),
            fix="write tie_word_embeddings: false in config.json",
        )
    head.register_parameter("weight", embedding.weight)  # type: ignore[arg-type]


def _report(masters: WholeMasters) -> InjectReport:
    """Rows by the last name of the module that holds the weight."""
    by_name: dict[str, list[Tensor]] = {}
    for name, master in masters.parameters.items():
        by_name.setdefault(name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2], []).append(master)
    rows = []
    for target, held in by_name.items():
        shapes: dict[Any, int] = {}
        for each in held:
            shape = tuple(each.shape) if each.dim() == 2 else (int(each.shape[0]), 1)
            shapes[shape] = shapes.get(shape, 0) + 1
        rows.append(ReportRow(target, len(held), tuple(sorted(shapes.items())), sum(each.numel() for each in held)))
    return InjectReport(tuple(rows), sum(row.parameters for row in rows))
