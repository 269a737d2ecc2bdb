"""Builds a `Policy` from a Hugging Face folder: structure from transformers, weights tensor by tensor as stored on
disk.

Belongs here: the order of loading, the modules without storage, injecting the adapter.
Does not belong here: matching tensors to modules (`fill`), families, formats (`quant`), the maths of adapters.

Peak host memory while loading is the packed base plus the current tensor: the model is built without storage, and every
quantised weight keeps its packed bytes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from orbit_runtime.adapters.config import AdapterConfig, InjectReport
from orbit_runtime.adapters.inject import inject
from orbit_runtime.errors import ManifestError, ModelError, OrbitError, UnsupportedError
from orbit_runtime.model_info.checkpoint import read_config
from orbit_runtime.model_info.families import FAMILIES
from orbit_runtime.model_info.families.blocks import GQA_TARGETS, MLP_TARGETS
from orbit_runtime.model_info.layouts import check_head, read_linears
from orbit_runtime.model_info.module_tree import check_type, language_part, refused_type, shipped_types
from orbit_runtime.model_info.quantization import parse_quantization
from orbit_runtime.policy.attention import Kernel, Mode, decoder_of, layers_of
from orbit_runtime.policy.direct import build_direct
from orbit_runtime.policy.families import DENSE, Family, find_family
from orbit_runtime.policy.families.published import published_family
from orbit_runtime.policy.fill import fill
from orbit_runtime.policy.model import Policy
from orbit_runtime.policy.modules import fuse_norms, keep_rows_apart, keep_stream_fp32, skip_indexers, widen_linears
from orbit_runtime.policy.probe import cached_behaviour, check_rope
from orbit_runtime.policy.reader import CheckpointReader
from orbit_runtime.policy.recurrent import pack_recurrence
from orbit_runtime.policy.routing import build_routing
from orbit_runtime.policy.shares import UNDIVIDED, Share, drop_modules
from orbit_runtime.policy.whole_rows import keep_states
from orbit_runtime.quant.activations import ActivationPrecision
from orbit_runtime.quant.kernels import panels
from orbit_runtime.quant.linear import FrozenLinear
from orbit_runtime.storage.cache import Cache, default_cache

INDEXER = "indexer."
"""Part of the names of what chooses the keys that a query sees: nothing there gets a gradient."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Parts of names of linears that choose experts, or weigh them."""
WRAPPED = ("gemma3", "mistral3", "qwen3_5", "qwen3_5_moe")
"""Types with a vision tower that are published for text too: the tower is left out, and images are not supported."""
DEFAULT_LONGEST = 4096
"""Maximum length of sequences of a model whose configuration names none."""


_whole_config = partial(AutoConfig.from_pretrained, local_files_only=True, trust_remote_code=False)


class PolicySettings(TypedDict, total=False):
    """The arguments of `load_policy` that a manifest decides."""

    precision: str
    activation_precision: ActivationPrecision
    seed: int
    device: str
    compute_dtype: torch.dtype
    kernel: Kernel
    longest: int


def _keep_freed_memory() -> None:
    """Makes glibc keep what is freed: it would hand a pass's memory back to the kernel, which clears it for the next
    pass, page by page. Tensors of 32 MiB and more are handed back as before."""
    mallopt = getattr(CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, (1 << 31) - 1)
        mallopt(mmap_threshold, 32 << 20)


def load_policy(
    folder: Path,
    adapter: AdapterConfig,
    *,
    precision: str = "Auto",
    activation_precision: ActivationPrecision = "WeightOnly",
    seed: int = 0,
    device: torch.device | str = "cpu",
    compute_dtype: torch.dtype = torch.float32,
    kernel: Kernel = "SDPA",
    share: Share = UNDIVIDED,
    longest: int | None = None,
    announce: Callable[[InjectReport], None] | None = None,
) -> Policy:
    """Loads the base and injects the adapter.

    Args:
        precision: the manifest's value, checked against the checkpoint; `Auto` accepts the checkpoint's own.
        activation_precision: format to which the inputs of linears with weights in that format are rounded.
        seed: seed of the adapter's initial values.
        compute_dtype: dtype of activations; a BF16 weight widened to fp32 keeps its value.
        share: the part of a divided model that this process holds.
        longest: maximum length of a sequence; None for the model's own.
        announce: called with the adapter's size before it is allocated.

    Raises:
        ModelError: something is missing, broken, or unknown in the folder.
        ManifestError: `precision` or the format of activations is not the checkpoint's, or a target matches nothing.
        UnsupportedError: the architecture requires something that Orbit does not support (`build_model`).
    """
    device = torch.device(device)
    raw = read_config(folder)
    family = find_family(raw.get("model_type"))
    reader = CheckpointReader(folder, device)
    quant = parse_quantization(raw, where=str(folder / "config.json"), tensors=reader.headers())
    config_file = str(folder / "config.json")
    check_head(raw, read_linears(reader.tensors, quant, config=config_file), config_file)
    if precision not in ("Auto", quant.name):
        raise ManifestError(
            f"the manifest says {precision}, the checkpoint is {quant.name}",
            where="spec.model.precision",
            fix=f"set it to {quant.name} or Auto",
        )
    adapter = _with_targets(adapter, raw)
    _check_targets(adapter, family)
    model, mode = build_model(folder, raw, family, longest)
    if family is DENSE:
        family = published_family(model, reader.tensors, mode.uncalled)
    share = share.of_layers(len(layers_of(model)))
    fill(model, reader, quant, family, compute_dtype, activation_precision, share)
    vocabulary = model.get_output_embeddings().out_features
    drop_modules(model, share)
    if compute_dtype is torch.float32:
        fuse_norms(model)
    model.requires_grad_(False).eval().to(device)
    adapter = _with_linears(adapter, model, family.no_targets)
    injected = inject(
        model,
        adapter.targets,
        adapter,
        seed,
        compute_dtype=compute_dtype,
        left_out=family.no_targets,
        is_part=share.layers is not None,
        announce=announce and (lambda report: announce(replace(report, passes=mode.said))),
    )
    keep_stream_fp32(model, compute_dtype)
    keep_rows_apart(model, device, compute_dtype)
    return Policy(
        model, replace(injected, report=replace(injected.report, passes=mode.said)), device, compute_dtype, vocabulary,
        quant.name, kernel, build_direct(model, compute_dtype) if share == UNDIVIDED else None, mode=mode,
        routing=build_routing(model, family.gate_weights) if mode.decode == "pages" else None,
        checkpoint_name=family.checkpoint_name,
    )  # fmt: skip


def widen(policy: Policy) -> Policy:
    """In place of this policy: one that holds its linears in the dtype in which it computes (`widen_linears`)."""
    widen_linears(policy.model, policy.compute_dtype)
    head = policy.model.get_output_embeddings()
    if policy.compute_dtype is torch.bfloat16 and isinstance(head, FrozenLinear) and panels.kernel(torch.bfloat16):
        head.order()
    return replace(policy, direct=build_direct(policy.model, policy.compute_dtype, ordered=True))


def _with_targets(adapter: AdapterConfig, raw: dict[str, Any]) -> AdapterConfig:
    """Fills in missing targets with the usual ones of a known family's language model, without a vision tower."""
    if adapter.targets or raw.get("model_type") not in FAMILIES:
        return adapter
    language = {"model_type": "kimi_k2", **language_part(raw)} if raw["model_type"] == "kimi_k25" else raw
    return replace(adapter, targets=FAMILIES[language["model_type"]](language).default_targets)


def _with_linears(adapter: AdapterConfig, model: nn.Module, left_out: Sequence[str]) -> AdapterConfig:
    """Fills in missing targets with every linear of the decoder's layers that is no router and is large enough."""
    if adapter.targets:
        return adapter
    found: dict[str, None] = {}
    for name, module in layers_of(model).named_modules():
        last = name.rpartition(".")[2]
        if not hasattr(module, "in_features") or is_router(name) or any(part in name for part in (*left_out, INDEXER)):
            continue
        if adapter.type == "OFT":
            fits = int(module.in_features) % adapter.block_size == 0
        else:
            fits = min(int(module.in_features), int(module.out_features)) >= adapter.rank
        if fits:
            found[last] = None
    return replace(adapter, targets=sorted_targets(found))


def is_router(name: str) -> bool:
    """Args: name: of a linear within the decoder's layers."""
    return not {*name.split(".")}.isdisjoint(ROUTERS)


def sorted_targets(names: Iterable[str]) -> tuple[str, ...]:
    """The names that most models have first, in their usual order."""
    usual = (*GQA_TARGETS, *MLP_TARGETS)
    return tuple(sorted(names, key=lambda last: usual.index(last) if last in usual else len(usual)))


def _check_targets(adapter: AdapterConfig, family: Family) -> None:
    for index, target in enumerate(adapter.targets):
        reason = family.refused_targets.get(target.rpartition(".")[2])
        if reason is not None:
            raise ManifestError(
                f"{target} is not to be adapted: {reason}",
                where=f"spec.adapter.targets[{index}]",
                fix="remove it",
            )


def build_config(folder: Path, raw: dict[str, Any], family: Family) -> PretrainedConfig:
    """The configuration of the language model, defaults included.

    Raises:
        ModelError, UnsupportedError: transformers does not know it.
    """
    with _explained(folder, raw):
        language = family.language_config(raw)
        if language is raw:
            config = _whole_config(folder)
            if raw.get("model_type") in WRAPPED:
                whole, config = config, config.get_text_config()
                config.tie_word_embeddings |= whole.tie_word_embeddings
        else:
            config = AutoConfig.for_model(**language)
        # We read packed weights ourselves; with this set, transformers would replace modules with its own.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    return config


def build_model(folder: Path, raw: dict[str, Any], family: Family, longest: int | None) -> tuple[nn.Module, Mode]:
    """The model's modules, with parameters that have no storage, and how its passes run: measured, unless the family's
    tests prove it.

    Raises:
        UnsupportedError: what it computes for a sequence depends on the others of a pass, its code fails, or
            transformers does not know its type.
    """
    where = str(folder / "config.json")
    check_type(raw, where)
    config = build_config(folder, raw, family)
    longest = longest or int(getattr(config, "max_position_embeddings", None) or DEFAULT_LONGEST)
    check_rope(config, longest, where)
    mode = family.mode
    if raw.get("model_type") not in FAMILIES:
        found = cached_behaviour(_build(folder, raw, config, "eager"), raw, longest, Cache(default_cache(os.environ)))
        if found.refused:
            raise refused_type(raw, found.refused, where)
        mode = found.mode
    _keep_freed_memory()
    model = _build(folder, raw, config, mode.attention)
    return _in_whole(model, folder, raw), replace(mode, has_tower="vision_config" in raw)


def checkpoint_names(folder: Path, tensors: Iterable[str]) -> Callable[[str], str]:
    """Name of a module in transformers → its name among the checkpoint's tensors, for writing them.

    Raises:
        UnsupportedError: linears are stored `[in, out]`.
    """
    raw = read_config(folder)
    family = find_family(raw.get("model_type"))
    if family is not DENSE or raw.get("model_type") in FAMILIES:
        return family.checkpoint_name
    model = _build(folder, raw, build_config(folder, raw, family), "eager")
    if any(isinstance(module, Conv1D) for module in model.modules()):
        raise UnsupportedError(
            "its linears are stored by columns, which Orbit reads but does not write", where=str(folder)
        )
    return published_family(_in_whole(model, folder, raw), tensors, ()).checkpoint_name


def _in_whole(model: Any, folder: Path, raw: dict[str, Any]) -> nn.Module:
    """The language model under the names that it has in the published model, which has no vision tower then."""
    if raw.get("model_type") not in WRAPPED:
        return model  # type: ignore[no-any-return]
    with _explained(folder, raw), init_empty_weights():
        whole: Any = AutoModelForImageTextToText.from_config(_whole_config(folder), dtype=torch.float32)
    for name, _ in list(whole.model.named_children()):
        delattr(whole.model, name)
    whole.model.language_model, whole.lm_head = decoder_of(model), model.get_output_embeddings()
    whole.config.text_config = model.config
    return whole


def _build(folder: Path, raw: dict[str, Any], config: PretrainedConfig, attention: str) -> nn.Module:
    """Modules without storage; buffers are real, since they are computed."""
    with _explained(folder, raw), init_empty_weights(include_buffers=False):
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            # No sequence needs the long factors, and transformers would write the short ones anew at every pass.
            module.rope_type = "default"  # type: ignore[assignment]
    skip_indexers(model)
    pack_recurrence(model)
    keep_states(model)
    return model


@contextmanager
def _explained(folder: Path, raw: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except OrbitError:
        raise
    except Exception as error:  # the library raises anything from KeyError to ImportError for a config it cannot use
        summary = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where, message = str(folder / "config.json"), f"transformers cannot build this model: {summary}"
        kind = raw.get("model_type")
        if kind and not (kind in FAMILIES or kind in shipped_types()):
            raise refused_type(raw, message, where) from error
        raise ModelError(
            message,
            where=where,
            fix="use a model whose architecture the installed transformers knows",
        ) from error
