"""From a Hugging Face folder to a `Policy`: structure from transformers, weights tensor by tensor as they lie on disk.

Belongs here: matching checkpoint tensors to modules, frozen modules, injecting the adapter.
Does not belong here: formats (`quant`), which formats exist in a config (`model_info`), the maths of adapters.

Peak host memory while loading is the packed base plus the tensor at hand: the model is built without storage, and every
quantised weight keeps its packed bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.inject import inject
from orbit_runtime.errors import ManifestError, ModelError, OrbitError, UnsupportedError
from orbit_runtime.model_info.headers import TensorInfo, read_folder
from orbit_runtime.model_info.quantization import QuantFormat, from_legacy_modelopt, parse_quantization
from orbit_runtime.model_info.settings import load_settings
from orbit_runtime.policy.attention import IMPLEMENTATION, Kernel
from orbit_runtime.policy.direct import build_direct
from orbit_runtime.policy.model import Policy
from orbit_runtime.policy.modules import FrozenEmbedding, fuse_norms
from orbit_runtime.quant.formats import FORMATS, Codec, Weight
from orbit_runtime.quant.linear import FrozenLinear

IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
"""Tensors of no use here: what the model computes itself, and static scales of activations and caches (weight-only)."""
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")


def load_policy(
    folder: Path,
    adapter: AdapterConfig,
    *,
    precision: str = "Auto",
    seed: int = 0,
    device: torch.device | str = "cpu",
    compute_dtype: torch.dtype = torch.float32,
    kernel: Kernel = "SDPA",
) -> Policy:
    """Loads the base and injects the adapter.

    Args:
        precision: the manifest's word, checked against the checkpoint; `Auto` takes what the checkpoint is.
        seed: of the adapter's initial values.
        compute_dtype: of activations; a BF16 weight widened to fp32 keeps its value.

    Raises:
        ModelError: something is missing, broken, or unknown in the folder.
        ManifestError: `precision` differs from the checkpoint's, or a target matches nothing.
        UnsupportedError: the architecture does what Orbit does not.
    """
    device = torch.device(device)
    raw = read_config(folder)
    reader = CheckpointReader(folder, device)
    quant = parse_quantization(raw, where=str(folder / "config.json"), tensors=reader.headers())
    if precision not in ("Auto", quant.name):
        raise ManifestError(
            f"the manifest says {precision}, the checkpoint is {quant.name}",
            where="spec.model.precision",
            fix=f"set it to {quant.name} or Auto",
        )
    model = _build_structure(folder)
    _fill_linears(model, reader, quant)
    _fill_embedding(model, reader, compute_dtype)
    _fill_rest(model, reader, compute_dtype)
    reader.check_all_used()
    if compute_dtype is torch.float32:
        fuse_norms(model)
    model.requires_grad_(False)
    model.eval()
    model.to(device)
    head = model.get_output_embeddings()
    injected = inject(model, adapter.targets, adapter, seed, compute_dtype=compute_dtype)
    direct = build_direct(model, compute_dtype)
    return Policy(model, injected, device, compute_dtype, head.out_features, quant.name, kernel, direct)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError("the model folder does not exist", where=str(folder), fix="correct spec.model.uri")
    try:
        config = load_settings(path)
    except FileNotFoundError:
        raise ModelError(
            "the model folder holds no config.json", where=str(folder), fix="correct spec.model.uri"
        ) from None
    for key in LOGIT_TRANSFORMS:
        if config.get(key) not in (None, 1, 1.0):
            raise UnsupportedError(f"{key} = {config[key]} is not supported", where=str(path))
    legacy = folder / "hf_quant_config.json"
    if not config.get("quantization_config") and legacy.is_file():
        return config | {"quantization_config": from_legacy_modelopt(load_settings(legacy))}
    return config


def _build_structure(folder: Path) -> nn.Module:
    """The model's modules with parameters that have no storage; buffers are real, they are computed, not loaded."""
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        # We read packed weights ourselves; with this set, transformers would replace modules by its own.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=torch.float32)
    except OrbitError:
        raise
    except Exception as error:  # the library raises anything from KeyError to ImportError for a config it cannot use
        summary = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"transformers cannot build this model: {summary}",
            where=str(folder / "config.json"),
            fix="use a model whose architecture the installed transformers knows",
        ) from error
    if not model._supports_attention_backend:
        raise UnsupportedError(
            f"{type(model).__name__} does not let its attention be chosen", where=str(folder / "config.json")
        )
    return model


class CheckpointReader:
    """Reads tensors of a folder by name, and knows which were never asked for."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self._tensors: dict[str, tuple[Path, TensorInfo]] = read_folder(folder)
        self._unused = set(self._tensors)
        self._device = device
        self._open: tuple[Path, Any] | None = None

    def headers(self) -> dict[str, TensorInfo]:
        return {name: info for name, (_, info) in self._tensors.items()}

    def file_of(self, name: str) -> Path:
        return self._tensors[name][0] if name in self._tensors else self.folder

    def has(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str) -> torch.Tensor:
        """On the device, in the file's dtype."""
        if name not in self._tensors:
            raise ModelError(
                f"the checkpoint holds no tensor {name}", where=str(self.folder), fix="download the model again"
            )
        path, _ = self._tensors[name]
        if self._open is None or self._open[0] != path:
            self._open = (path, safe_open(str(path), framework="pt", device="cpu"))
        self._unused.discard(name)
        return self._open[1].get_tensor(name).to(self._device)

    def check_all_used(self) -> None:
        left = sorted(name for name in self._unused if not name.endswith(IGNORED_SUFFIXES))
        if left:
            listed = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            raise ModelError(f"tensors that belong to no layer of this model: {listed}", where=str(self.folder))


def _fill_linears(model: nn.Module, reader: CheckpointReader, quant: QuantFormat) -> None:
    """Every `nn.Linear` becomes a `FrozenLinear` over the checkpoint's own tensors."""
    tied = _tied_head(model, reader)
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear:
            continue
        where = str(reader.folder)
        source = tied if name == "lm_head" and tied else name
        layout = layout_of(quant, name, reader) if source == name else "BF16"
        codec = FORMATS[layout]
        if layout != "BF16" and not reader.has(codec.tensor_names(name)[0]):
            raise ModelError(
                f"{name} should be {codec.precision}, but the checkpoint has no {codec.tensor_names(name)[0]}",
                where=where,
            )
        weight = read_weight(reader, codec, source)
        if tuple(weight.shape) != (module.out_features, module.in_features):
            raise ModelError(
                f"{source} is {list(weight.shape)}, config.json says [{module.out_features}, {module.in_features}]",
                where=where,
                fix="config.json and the weights are of two models: copy or download the model again",
            )
        bias = reader.read(f"{name}.bias") if module.bias is not None else None
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, FrozenLinear(weight, bias))


def layout_of(quant: QuantFormat, name: str, reader: CheckpointReader) -> str:
    """The layout of the module's tensors: what the config says, where the file bears it out."""
    layout = quant.layout_of(name)
    if quant.by_tensor and not reader.has(FORMATS[layout].tensor_names(name)[-1]):
        return "BF16"
    return layout


def read_weight(reader: CheckpointReader, codec: Codec, source: str) -> Weight:
    """The module's packed weight; what is wrong with a tensor is said with its file."""
    names = codec.tensor_names(source)
    tensors = {name: reader.read(name) for name in names}
    try:
        weight: Weight = codec.from_checkpoint(tensors, source)
    except ModelError as error:
        where = f"{reader.file_of(error.where)}: {error.where}" if error.where in names else error.where
        raise ModelError(error.message, where=where, fix=error.fix) from None
    return weight


def _fill_embedding(model: nn.Module, reader: CheckpointReader, compute_dtype: torch.dtype) -> None:
    """The plain embedding stays BF16 and is shared with a tied head; a subclass keeps its own arithmetic."""
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding:
        return
    head = model.get_output_embeddings()
    if _tied_head(model, reader):
        model.set_input_embeddings(FrozenEmbedding(head.packed.qdata, compute_dtype))
        return
    name = next(key for key, module in model.named_modules() if module is embedding)
    weight = FORMATS["BF16"].from_checkpoint({f"{name}.weight": reader.read(f"{name}.weight")}, name)
    model.set_input_embeddings(FrozenEmbedding(weight.qdata, compute_dtype))


def _tied_head(model: nn.Module, reader: CheckpointReader) -> str | None:
    """Name of the embedding that doubles as the output head, or `None` where the head has a tensor of its own."""
    if reader.has("lm_head.weight") or not getattr(model.config, "tie_word_embeddings", False):
        return None
    embedding = model.get_input_embeddings()
    return next(name for name, module in model.named_modules() if module is embedding)


def _fill_rest(model: nn.Module, reader: CheckpointReader, compute_dtype: torch.dtype) -> None:
    """Norms and whatever else is a parameter: small, so kept in the compute dtype."""
    for name, parameter in list(model.named_parameters()):
        value = reader.read(name)
        if value.shape != parameter.shape or not value.is_floating_point():
            raise ModelError(
                f"{name} is {value.dtype} {list(value.shape)}, expected {list(parameter.shape)}",
                where=str(reader.folder),
            )
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        owner.register_parameter(child, nn.Parameter(value.to(compute_dtype), requires_grad=False))
