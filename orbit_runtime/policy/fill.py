"""Turns a model's modules without storage into frozen modules over the checkpoint's own tensors.

Belongs here: matching tensors to linears, experts, embedding, norms and routers.
Does not belong here: a family's module names and the layout of its experts (`families`), formats.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from orbit_runtime.adapters.part import WeightPart
from orbit_runtime.errors import ManifestError, ModelError, UnsupportedError
from orbit_runtime.model_info.quantization import QuantFormat
from orbit_runtime.policy.experts import FrozenExperts
from orbit_runtime.policy.families.family import ExpertForm, Family
from orbit_runtime.policy.families.published import form_of
from orbit_runtime.policy.modules import FrozenEmbedding, run_in_fp32
from orbit_runtime.policy.reader import CheckpointReader
from orbit_runtime.policy.shares import UNDIVIDED, Share, cut_bias, cut_experts, cut_weight
from orbit_runtime.quant.activations import ActivationPrecision, build_rounding, scale_name
from orbit_runtime.quant.bf16 import BF16Weight
from orbit_runtime.quant.expert_linear import FrozenExpertLinear
from orbit_runtime.quant.experts import ExpertStack
from orbit_runtime.quant.formats import FORMATS, Codec, Weight
from orbit_runtime.quant.linear import FrozenLinear

EMBEDDINGS = re.compile(r"\b(embed_in|embed_tokens|word_embeddings|wte|tok_embeddings)\.weight$")
"""Names in transformers' families of the layer that has the output layer's shape but is not the output layer."""
MISMATCH = "config.json and the weights belong to different models: copy or download the model again"


def fill(
    model: nn.Module,
    reader: CheckpointReader,
    quant: QuantFormat,
    family: Family,
    compute_dtype: torch.dtype,
    activation_precision: ActivationPrecision = "WeightOnly",
    share: Share = UNDIVIDED,
) -> None:
    """Cuts each weight to this process's share as soon as it is read, so only one whole weight is held in addition.

    Raises `ModelError` for a tensor that is missing, broken, of another shape, or belongs to no module.

    `ManifestError` if no weight has the format that activations are to be rounded to, `UnsupportedError` if a routed
    expert's inputs would be rounded.
    """
    _fill_experts(model, reader, quant, family, share)
    _check_experts(model, activation_precision, reader)
    num_rounded = _fill_linears(model, reader, quant, family, activation_precision, share)
    if activation_precision != "WeightOnly" and num_rounded == 0:
        raise ManifestError(
            f"no weight of the checkpoint is {activation_precision}; it is {quant.name}",
            where="spec.model.activationPrecision",
            fix="set it to WeightOnly, or train the model in that format",
        )
    if share.is_first:
        _fill_embedding(model, reader, family, compute_dtype)
    _fill_rest(model, reader, family, compute_dtype, share)
    if share == UNDIVIDED:
        reader.check_all_used((*family.left_out, *_extra_layers(model, family)))


def _extra_layers(model: nn.Module, family: Family) -> Iterator[str]:
    """Layers after the last one, used only for speculative decoding (MTP): transformers leaves them out as well."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    last = int(config.num_hidden_layers)
    for layer in range(last, last + int(getattr(config, "num_nextn_predict_layers", 0) or 0)):
        yield re.escape(family.checkpoint_name(f"model.layers.{layer}."))


def _fill_experts(model: nn.Module, reader: CheckpointReader, quant: QuantFormat, family: Family, share: Share) -> None:
    """transformers' experts, one parameter per layer, become `FrozenExperts` over packed tensors. Those of another form
    stay as they are."""
    for name, module in list(model.named_modules()):
        if not type(module).__name__.endswith("Experts") or not share.holds(name):
            continue
        form = family.experts or form_of(module, family.checkpoint_name)
        if form is None:
            continue
        held = share.experts_of(name, int(module.num_experts))  # type: ignore[arg-type]
        linears = {
            projection.name: _read_projection(reader, quant, family, form, name, held, projection.name)
            for projection in form.projections
        }
        for projection in form.projections:
            wanted = (projection.out_features(module), projection.in_features(module))
            found = (linears[projection.name].out_features, linears[projection.name].in_features)
            linears[projection.name].part = WeightPart(  # type: ignore[assignment]
                experts=slice(held.start, held.stop),
                shape=found,
                num_experts=int(module.num_experts),
                group="expert",  # type: ignore[arg-type]
            )
            if found != wanted:
                raise ModelError(
                    f"the experts' {projection.name} in {name} is {list(found)}, config.json says {list(wanted)}",
                    where=str(reader.folder),
                    fix=MISMATCH,
                )
        _replace(model, name, FrozenExperts(linears, form.build_activation(module), held))


def _read_projection(
    reader: CheckpointReader, quant: QuantFormat, family: Family, form: ExpertForm, name: str, held: range, leaf: str
) -> FrozenExpertLinear:
    reads_tokens = leaf != "down_proj"
    sources = family.expert_sources(name, leaf)
    read_stacked = form.read_stacked if sources is None else None
    if read_stacked is not None:
        stack, bias = read_stacked(reader, quant, f"{name}.{leaf}")
        if len(held) < stack.num_experts:
            stack = cut_experts(stack, held)
            bias = None if bias is None else bias[held.start : held.stop].clone()
        return FrozenExpertLinear(stack, bias, reads_tokens=reads_tokens)
    if sources is not None and len(sources) < held.stop:
        raise ModelError(
            f"the checkpoint has {leaf} of {len(sources)} experts in {name}, config.json says {held.stop} or more",
            where=str(reader.folder),
            fix=MISMATCH,
        )
    if sources is None:
        sources = [family.checkpoint_name(f"{name}.{index}.{leaf}") for index in range(held.stop)]
    return FrozenExpertLinear(_read_stack(reader, quant, sources[held.start : held.stop]), reads_tokens=reads_tokens)


def _read_stack(reader: CheckpointReader, quant: QuantFormat, sources: Sequence[str]) -> ExpertStack:
    """Copies one expert at a time into tensors for all, so only one expert is held in addition to the stack."""
    layout = layout_of(quant, sources[0], reader)
    tensors: dict[str, torch.Tensor] = {}
    for index, source in enumerate(sources):
        other = layout_of(quant, source, reader)
        if other != layout:
            raise ModelError(
                f"{source} is {other}, {sources[0]} is {layout}: the experts of a layer must be of one format",
                where=str(reader.folder),
            )
        for key, part in FORMATS[layout].buffers(read_weight(reader, FORMATS[layout], source)).items():
            whole = tensors.setdefault(key, part.new_empty((len(sources), *part.shape)))
            if whole.shape[1:] != part.shape or whole.dtype != part.dtype:
                raise ModelError(
                    f"{source}.{key} is {part.dtype} {list(part.shape)}, that of the first expert "
                    f"{whole.dtype} {list(whole.shape[1:])}",
                    where=str(reader.folder),
                )
            whole[index].copy_(part)
    return ExpertStack(layout, tensors)


def _check_experts(model: nn.Module, activation_precision: ActivationPrecision, reader: CheckpointReader) -> None:
    for name, module in model.named_modules():
        if not isinstance(module, FrozenExpertLinear):
            continue
        if build_rounding(activation_precision, module.format, False) is not None:
            raise UnsupportedError(
                f"the inputs of routed experts ({name}) are not rounded to {activation_precision} yet",
                where="spec.model.activationPrecision",
                fix="set it to WeightOnly",
            )


def _fill_linears(
    model: nn.Module,
    reader: CheckpointReader,
    quant: QuantFormat,
    family: Family,
    activation_precision: ActivationPrecision,
    share: Share,
) -> int:
    """Turns every `nn.Linear` into a `FrozenLinear` over the checkpoint's tensors; returns how many round x."""
    tied, num_rounded = _tied_head(model, reader, family), 0
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        special = family.special_linears.get(type(module).__name__)
        if not (type(module) in (nn.Linear, Conv1D) or special) or not share.holds(name):
            continue
        if name.endswith(family.kept_linears):
            continue
        where = str(reader.folder)
        own = family.checkpoint_name(name)
        source = tied if module is head and tied else own
        layout = layout_of(quant, source, reader) if source == own else "BF16"
        codec = FORMATS[layout]
        if module is head and not any(reader.has(each) for each in codec.tensor_names(source)):
            raise _no_head(module, reader, codec.tensor_names(source)[0])
        if layout != "BF16" and not reader.has(codec.tensor_names(source)[0]):
            raise ModelError(
                f"{source} should be {codec.precision}, but the checkpoint has no {codec.tensor_names(source)[0]}",
                where=where,
            )
        weight = read_weight(reader, codec, source)
        shape = (module.out_features, module.in_features) if type(module) is not Conv1D else (module.nf, module.nx)
        if type(module) is Conv1D and isinstance(weight, BF16Weight):
            weight = BF16Weight(weight.qdata.t().contiguous())
        if tuple(weight.shape) != shape:
            raise ModelError(
                f"{source} is {list(weight.shape)}, config.json says {list(shape)}",
                where=where,
                fix=MISMATCH,
            )
        part = share.part_of(name, weight.shape)
        weight = cut_weight(weight, part)
        bias = cut_bias(reader.read(f"{own}.bias") if module.bias is not None else None, part, share)
        scale = f"{own}.{scale_name(activation_precision, layout)}"
        rounding = build_rounding(activation_precision, layout, reader.has(scale))
        num_rounded += rounding is not None
        input_scale = reader.read(scale) if rounding is not None and rounding.is_static else None
        frozen: nn.Module = FrozenLinear(weight, bias, rounding=rounding, input_scale=input_scale)
        frozen.part = part  # type: ignore[assignment]
        _replace(model, name, frozen if special is None else special(frozen, module))
    return num_rounded


def layout_of(quant: QuantFormat, name: str, reader: CheckpointReader) -> str:
    """The layout of the module's tensors, as configured and confirmed by the file."""
    layout = quant.layout_of(name)
    if quant.by_tensor and not reader.has(FORMATS[layout].tensor_names(name)[-1]):
        return "BF16"
    return layout


def read_weight(reader: CheckpointReader, codec: Codec, source: str) -> Weight:
    """The module's packed weight; errors in a tensor name its file."""
    names = codec.tensor_names(source)
    tensors = {name: reader.read(name) for name in names}
    try:
        weight: Weight = codec.from_checkpoint(tensors, source)
    except ModelError as error:
        where = f"{reader.file_of(error.where)}: {error.where}" if error.where in names else error.where
        raise ModelError(error.message, where=where, fix=error.fix) from None
    return weight


def _fill_embedding(model: nn.Module, reader: CheckpointReader, family: Family, compute_dtype: torch.dtype) -> None:
    """The plain embedding stays BF16 and is shared with a tied head; a subclass keeps its own arithmetic."""
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding:
        return
    head = model.get_output_embeddings()
    if _tied_head(model, reader, family) and isinstance(head, FrozenLinear):
        model.set_input_embeddings(FrozenEmbedding(head.packed.qdata, compute_dtype))
        return
    name = family.checkpoint_name(_name_of(model, embedding))
    weight = FORMATS["BF16"].from_checkpoint({f"{name}.weight": reader.read(f"{name}.weight")}, name)
    model.set_input_embeddings(FrozenEmbedding(weight.qdata, compute_dtype))


def _tied_head(model: nn.Module, reader: CheckpointReader, family: Family) -> str | None:
    """Name of the embedding that doubles as the output head, or `None` if the head has a tensor of its own."""
    own = reader.has(family.checkpoint_name(_name_of(model, model.get_output_embeddings())) + ".weight")
    config = model.config.get_text_config()  # type: ignore[union-attr,operator]
    if own or not getattr(config, "tie_word_embeddings", False):
        return None
    return family.checkpoint_name(_name_of(model, model.get_input_embeddings()))


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _no_head(head: nn.Linear, reader: CheckpointReader, wanted: str) -> ModelError:
    """The files may be complete but name their output layer differently, such as GPT-NeoX's `embed_out`."""
    shape = (head.out_features, head.in_features)
    named = [
        name
        for name, info in reader.headers().items()
        if tuple(info.shape) == shape and EMBEDDINGS.search(name) is None
    ]
    if not named:
        return ModelError(
            f"the checkpoint holds no output layer {wanted}, and config.json does not tie it to the embedding",
            where=str(reader.folder),
            fix="write tie_word_embeddings: true in config.json if the model is tied, or download the model again",
        )
    return ModelError(
        f"the checkpoint's output layer is {named[0]}, and Orbit reads one that is called {wanted}",
        where=str(reader.folder),
        fix="choose a model of a family that Orbit knows (docs/reference/sglang.md); another download is the same",
    )


def _fill_rest(
    model: nn.Module, reader: CheckpointReader, family: Family, compute_dtype: torch.dtype, share: Share
) -> None:
    """Norms and all other parameters: small, so kept in the compute dtype; routers in fp32."""
    routers = [name for name, module in model.named_modules() if type(module).__name__.endswith("Router")]
    kept = (*(f"{name}." for name in routers), *family.kept_fp32)
    for name, empty in _unfilled(model):
        if not share.holds(name):
            continue
        value = reader.read(family.checkpoint_name(name))
        if value.shape != empty.shape or value.is_floating_point() != empty.is_floating_point():
            raise ModelError(
                f"{family.checkpoint_name(name)} is {value.dtype} {list(value.shape)}, expected {list(empty.shape)}",
                where=str(reader.folder),
            )
        value = share.cut_per_head(name, value)
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        if isinstance(empty, nn.Parameter):
            dtype = torch.float32 if any(part in name for part in kept) else compute_dtype
            owner.register_parameter(child, nn.Parameter(value.to(dtype), requires_grad=False))
        else:
            owner.register_buffer(child, value.to(empty.dtype))
    if compute_dtype is not torch.float32:
        for name in routers:
            run_in_fp32(model.get_submodule(name))


def _unfilled(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and buffers that a checkpoint holds, of modules that are not frozen yet."""
    yield from list(model.named_parameters())
    for prefix, module in list(model.named_modules()):
        if isinstance(module, (FrozenLinear, FrozenExpertLinear, FrozenEmbedding)):
            continue
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
