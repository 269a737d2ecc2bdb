"""A whole model in place of the base: checked before it is loaded, then proven to be the one that answers.

Belongs here: comparing a checkpoint with the served base, its files with their recorded digests, and its weights in the
engine with its files. Does not belong here: replacing the base (`policies`), reading a model (`policy`).

No trainer takes part, so the proof rests on the files: they are read a second time, apart from the loader, and compared
with the weights that the passes multiply by, and the engine's log-probs of a canary with those of the training passes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from orbit_runtime.adapters.tensorfile import tensor_digest
from orbit_runtime.checkpoints.destination import MANIFEST as CONVERSION
from orbit_runtime.checkpoints.destination import file_digest
from orbit_runtime.data.chat import TOKENIZER_FILES, ChatTokenizer
from orbit_runtime.digests import first_difference
from orbit_runtime.errors import GateError, ManifestError, ModelError, UnsupportedError
from orbit_runtime.model_info.checkpoint import folder_headers, read_config
from orbit_runtime.model_info.headers import read_folder
from orbit_runtime.model_info.quantization import parse_quantization
from orbit_runtime.model_info.settings import load_settings
from orbit_runtime.policy.families import find_family
from orbit_runtime.policy.load import build_config
from orbit_runtime.policy.model import Policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.policy.snapshot import base_tensors
from orbit_runtime.storage import CorruptBundle, open_store
from orbit_runtime.storage.bundles import MANIFEST, read_pieces
from orbit_runtime.types import Engine

NEUTRAL = frozenset(
    {"_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config",
     "torch_dtype", "transformers_version", "use_cache", "_attn_implementation_autoset", "attn_implementation"}
)  # fmt: skip
"""Fields of config.json without effect on the passes; ends of completions are compared with the tokenizer."""
FLOATING = ("BF16", "F16", "F32")
CHANGED = "the file was changed: its SHA-256 is not the manifest's"
COPY = "copy the checkpoint again"
SHOWN = 3


@dataclass(frozen=True)
class ModelFolder:
    """A model folder that may take the base's place."""

    folder: Path
    version: int | None
    """Policy version, if a run wrote it."""
    tokenizer: str
    """`same` as the base's, or `base's` if the folder holds none."""


@dataclass(frozen=True)
class ModelProof:
    """Evidence that the engine computes with a checkpoint's weights."""

    tensors: int
    """Tensors whose values in the engine were compared with the file's."""
    packed: int
    """Weights stored in a packed format, which are checked by the canary alone."""
    weights_digest: str
    """Digest of every weight of the base as the engine holds it; see `Policy.base_digest`."""
    canary_error: float
    """max over the canary of |engine's log-prob - training passes' log-prob|."""
    canary_limit: float

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": "proven",
            "tensors_compared": self.tensors,
            "packed_weights": self.packed,
            "weights_digest": self.weights_digest,
            "canary_error": self.canary_error,
            "canary_limit": self.canary_limit,
        }


def check_checkpoint(folder: Path, base: Path, tokenizer: ChatTokenizer) -> ModelFolder:
    """Everything that can be seen without loading the weights.

    Args:
        base: folder of the model that the server started with.

    Raises:
        ModelError: a file is missing or changed, or the model is of another architecture, format or tokenizer.
    """
    folder_headers(folder)
    facts = _check_recorded(folder)
    found = {each: _structure(each) for each in (base, folder)}
    differences = [
        f"{name} is {_shown(found[folder].get(name))}, the base's is {_shown(found[base].get(name))}"
        for name in sorted({*found[base], *found[folder]})
        if found[base].get(name) != found[folder].get(name)
    ]
    if differences:
        more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise ModelError(
            f"this model is another than the served base: {'; '.join(differences[:SHOWN])}{more}",
            where=str(folder / "config.json"),
            fix="serve it with a server of its own: orbit serve --model FOLDER",
        )
    formats = {each: _precision(each) for each in (base, folder)}
    if formats[base] != formats[folder]:
        raise ModelError(
            f"the checkpoint is {formats[folder]}, the served base {formats[base]}",
            where=str(folder),
            fix=f"write it in the base's format (orbit convert, or orbit merge --precision {formats[base]}), or serve "
            "it with a server of its own",
        )
    version = facts.get("version")
    return ModelFolder(folder, version if isinstance(version, int) else None, _compare_tokenizers(folder, tokenizer))


def load_checked(load: Callable[[Path], Policy], folder: Path) -> Policy:
    """Raises ModelError for everything in the folder that cannot be loaded, GateError without memory for it."""
    try:
        return load(folder)
    except (ManifestError, UnsupportedError) as error:
        raise ModelError(error.message, where=error.where or str(folder), fix=error.fix) from error
    except torch.OutOfMemoryError:
        raise GateError(
            "there is no memory for a second copy of the model, which a replacement needs until it is proven",
            where=str(folder),
            fix="serve it with a server of its own, or give this one a smaller --limit running",
        ) from None


def prove_checkpoint(
    engine: Engine, policy: Policy, folder: Path, canary_T: Sequence[int], *, limit: float
) -> ModelProof:
    """Proves that the engine computes with the files' values.

    Args:
        engine: over `policy`.
        limit: largest difference of one log-prob between two orders of summation.

    Raises:
        GateError: the engine computes with other values than those of the files, or with values that are not finite.
    """
    compared, packed = compare_weights(policy, folder)
    batch = policy.pack([Branch(0, tuple(canary_T[:1]), tuple(canary_T[1:]))])
    with torch.no_grad(), policy.injected.selection.use(None):
        expected = policy.logprobs(batch)[0].tolist()
    error = 0.0
    for copy in engine.copies():
        (scored,) = copy.score(canary_T, [None])
        distances = [abs(x - y) for x, y in zip(scored.logprobs_T[1:], expected, strict=True)]
        error = max(error, math.nan if any(map(math.isnan, distances)) else max(distances))
        # `not <=`: a NaN must fail.
        if not error <= limit:
            raise GateError(
                f"the engine's log-probs of the canary differ by {error:.3g} from those of the training passes over "
                f"the same weights, limit {limit:.3g}",
                where=str(folder),
                fix="the weights are damaged or not finite: " + COPY,
            )
    return ModelProof(compared, packed, policy.base_digest(), error, limit)


def _structure(folder: Path) -> dict[str, Any]:
    """Every field of the language model's configuration that decides what is computed, defaults included."""
    raw = read_config(folder)
    config = build_config(folder, raw, find_family(raw.get("model_type"))).to_dict()
    return {name: value for name, value in config.items() if name not in NEUTRAL}


def _precision(folder: Path) -> str:
    headers = folder_headers(folder)
    return parse_quantization(headers.config, where=str(folder / "config.json"), tensors=headers.infos()).name


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _check_recorded(folder: Path) -> Mapping[str, Any]:
    """Compares the files with the digests that a run, a conversion or a merge recorded; returns a run's facts."""
    if (folder / CONVERSION).is_file():
        files = load_settings(folder / CONVERSION).get("files")
        for name, told in files.items() if isinstance(files, dict) else ():
            if not (folder / name).is_file():
                raise ModelError(f"{name} is missing", where=str(folder), fix=COPY)
            if file_digest(folder / name) != told.get("sha256"):
                raise ModelError(CHANGED, where=str(folder / name), fix=COPY)
    if not (folder / MANIFEST).is_file():
        return {}
    manifest, store = load_settings(folder / MANIFEST), open_store(str(folder), writable=False)
    parts = manifest.get("parts")
    for name, part in parts.items() if isinstance(parts, dict) else ():
        if not (folder / name).is_file():
            raise ModelError(f"{name} is missing", where=str(folder), fix=COPY)
        try:
            pieces = read_pieces(part)
        except (ValueError, TypeError, KeyError, AttributeError, CorruptBundle):
            raise ModelError("not a manifest", where=str(folder / MANIFEST), fix=COPY) from None
        if first_difference(store.view(name), pieces) is not None:
            raise ModelError(CHANGED, where=str(folder / name), fix=COPY)
    facts = manifest.get("facts")
    return facts if isinstance(facts, dict) else {}


def _compare_tokenizers(folder: Path, tokenizer: ChatTokenizer) -> str:
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return "base's"
    difference = tokenizer.difference(ChatTokenizer(folder))
    if difference:
        raise ModelError(
            f"its tokenizer is not the served base's: {difference}",
            where=str(folder),
            fix="remove the tokenizer's files to keep the base's, or serve it with a server of its own",
        )
    return "same"


def compare_weights(policy: Policy, folder: Path) -> tuple[int, int]:
    """Counts the compared tensors, and the packed ones among them; raises GateError for one that differs."""
    files = read_folder(folder)
    compared, packed = 0, 0
    for name, read in base_tensors(policy.model):
        found = files.get(policy.checkpoint_name(name))
        if found is None or found[1].dtype not in FLOATING:
            packed += 1
            continue
        with safe_open(str(found[0]), framework="pt", device="cpu") as file:
            stored: Tensor = file.get_tensor(found[1].stored_as or policy.checkpoint_name(name))
        held = read()
        if not torch.isfinite(stored).all():
            raise GateError(f"{name} holds values that are not finite", where=str(found[0]), fix=COPY)
        # A weight in fp32 or fp16 is rounded to BF16 where the family keeps no more.
        if tensor_digest(held) not in (tensor_digest(stored), tensor_digest(stored.bfloat16())):
            raise GateError(f"the engine holds other values of {name} than the file", where=str(found[0]), fix=COPY)
        compared += 1
    return compared, packed
