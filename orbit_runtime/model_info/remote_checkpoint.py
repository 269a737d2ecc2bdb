"""Facts of a checkpoint in an object store or on a hub, by range reads of its headers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from orbit_runtime.errors import ModelError
from orbit_runtime.model_info.checkpoint import LEGACY_QUANTISATION, Headers, headers_facts
from orbit_runtime.model_info.headers import (
    MAX_HEADER_BYTES,
    TensorInfo,
    is_stale,
    parse_header,
    read_weight_map,
    with_known_names,
)
from orbit_runtime.model_info.quantization import from_legacy_modelopt
from orbit_runtime.model_info.settings import parse_settings
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.storage import NotFound

FIRST_READ = 1 << 20
"""Most headers are smaller, so that one request reads length and header."""


class ModelFiles(Protocol):
    """A model's files in a store or a hub repository; a missing file raises `NotFound`."""

    uri: str

    def exists(self, key: str) -> bool: ...
    def size(self, key: str) -> int: ...
    def get(self, key: str) -> bytes: ...
    def get_range(self, key: str, start: int, end: int) -> bytes: ...


def store_headers(store: ModelFiles, *, first_read: int = FIRST_READ) -> Headers:
    """Headers of a model under a store's URI or in a repository, by range reads.

    Args:
        first_read: number of bytes of a file in the first request.
    """
    weight_map = _weight_map(store)
    tensors: dict[str, tuple[Path | str, TensorInfo]] = {}
    for name in sorted(set(weight_map.values())) if weight_map else ["model.safetensors"]:
        found = _read_header(store, name, first_read)
        listed = {each for each, file in weight_map.items() if file == name}
        if listed - found.keys():
            raise ModelError(
                f"the index lists {min(listed - found.keys())}, which {name} does not hold",
                where=store.uri,
                fix="upload the model again",
            )
        tensors |= {each: (name, info) for each, info in found.items() if not weight_map or each in listed}
    config = parse_settings(store.get("config.json"), f"{store.uri}/config.json")
    if not config.get("quantization_config") and store.exists(LEGACY_QUANTISATION):
        config["quantization_config"] = from_legacy_modelopt(
            parse_settings(store.get(LEGACY_QUANTISATION), f"{store.uri}/{LEGACY_QUANTISATION}")
        )
    return Headers(store.uri, config, with_known_names(tensors))


def store_facts(store: ModelFiles, *, first_read: int = FIRST_READ) -> ModelFacts:
    """Facts of a model under a store's URI or in a repository, by range reads of its headers."""
    return headers_facts(store_headers(store, first_read=first_read), store.uri)


def _weight_map(store: ModelFiles) -> dict[str, str]:
    """Tensor → file, from the index; empty if there is only one file."""
    try:
        index = parse_settings(store.get("model.safetensors.index.json"), f"{store.uri}/model.safetensors.index.json")
    except NotFound:
        if not store.exists("model.safetensors"):
            raise ModelError(
                "there is neither model.safetensors nor model.safetensors.index.json",
                where=store.uri,
                fix="name a Hugging Face model folder with safetensors weights",
            ) from None
        return {}
    listed = read_weight_map(index, store.uri, "upload the model again")
    return {} if store.exists("model.safetensors") and is_stale(listed, store.exists, store.uri) else listed


def _read_header(store: ModelFiles, name: str, first_read: int) -> Mapping[str, TensorInfo]:
    try:
        size = store.size(name)
        start = store.get_range(name, 0, min(size, first_read))
        length = 8 + int.from_bytes(start[:8], "little")
        if len(start) < length <= min(size, MAX_HEADER_BYTES):
            start += store.get_range(name, len(start), length)
    except NotFound:
        raise ModelError(f"the shard {name} is missing", where=store.uri, fix="upload the model again") from None
    return parse_header(start, size=size, where=f"{store.uri}/{name}").tensors
