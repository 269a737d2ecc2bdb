"""A stored adapter in a folder or a store: its files, their contents, and the base on which it was trained.

Belongs here: reading, checking digests, describing by headers; no torch.
Does not belong here: computing with the tensors (`combine`, `merge`), proving a publish (`loop`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Buffer, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isqrt, prod
from pathlib import Path
from typing import Any, Literal, get_args

from orbit_runtime.adapters.files import is_outer, layer_of
from orbit_runtime.digests import first_difference
from orbit_runtime.errors import ModelError, UsageError
from orbit_runtime.model_info.headers import TensorHeader, parse_header
from orbit_runtime.observability.run_folder import find_best
from orbit_runtime.spec.adapter import NEUMANN_TERMS
from orbit_runtime.storage import NotFound, Store, open_store, read_run_file
from orbit_runtime.storage.bundles import MANIFEST, list_bundles, read_pieces

CONFIG_FILE, MODEL_FILE, ROTATIONS_FILE = "adapter_config.json", "adapter_model.safetensors", "rotations.safetensors"
PREFIX = "base_model.model."
COPY = "copy both files again, from the same LoRA or OFT adapter of PEFT"
TYPES = {"LORA": "LoRA", "OFT": "OFT"}
ExpertLayout = Literal["None", "Shared", "SharedOuter", "PerExpert"]
EVALUATION, INTERVAL = "evaluation", ("mean", "low", "high")
"""Fact of an adapter that its run evaluated; what each environment has there."""
MOST_EVALUATIONS = 8
EXPERT_LAYOUTS: tuple[ExpertLayout, ...] = get_args(ExpertLayout)
"""Ordered by number of parameters, fewest first: each can express those before it."""
NEUTRAL_FIELDS = frozenset({
    # Read here.
    "peft_type", "r", "lora_alpha", "use_rslora", "oft_block_size", "use_cayley_neumann", "num_cayley_neumann_terms",
    # Where it came from, and which layers it adapts, as the tensors' names say too.
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_config", "megatron_core",
    # How it was trained, and settings of what another field switches on.
    "inference_mode", "lora_dropout", "module_dropout", "init_weights", "runtime_config", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "qalora_group_size", "eps",
})  # fmt: skip
"""Fields of PEFT's configuration with which an adapter computes the same whatever they hold, or that Orbit reads. Each
other field must hold nothing, or one of `PLAIN`: it may change the arithmetic."""
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
}  # fmt: skip
ADAPTERS = "adapters/"
"""Folder of the adapters that a run published."""


def adapter_name(version: int) -> str:
    return f"policy-v{version}"


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """Example: `AdapterFolder("runs/a/adapters/policy-v3", {...}, {...}, header, {...})`."""

    place: str
    config: Mapping[str, Any]
    """adapter_config.json."""
    files: Mapping[str, Buffer]
    header: TensorHeader
    """Header of `adapter_model.safetensors`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts that the publish wrote into `manifest.json`; empty for an adapter that Orbit did not write."""
    chosen: str = ""
    """Why it is this one of its run's; empty for an adapter that was named itself."""

    @property
    def type(self) -> str:
        return TYPES[self.config["peft_type"]]

    @property
    def rank(self) -> int:
        """LoRA: rank; OFT: block size."""
        return int(self.config["r"] if self.type == "LoRA" else self.config["oft_block_size"])

    @property
    def base_weights(self) -> str | None:
        """Digest of the weights on which it was trained; None if not recorded."""
        base = self.facts.get("base")
        return str(base["weights"]) if isinstance(base, Mapping) and base.get("weights") else None

    @property
    def parametrization(self) -> Literal["CayleyNeumann", "Cayley"]:
        """OFT."""
        return "CayleyNeumann" if self.config.get("use_cayley_neumann") else "Cayley"

    @property
    def neumann_terms(self) -> int:
        """OFT: number of terms of the series."""
        return int(self.config.get("num_cayley_neumann_terms") or NEUMANN_TERMS)

    @property
    def run(self) -> str | None:
        """Name of the run that published it; None if not recorded."""
        return str(self.facts["run"])[:64] if self.facts.get("run") else None

    @property
    def evaluation(self) -> dict[str, dict[str, float | None]]:
        """Environment → mean reward with its interval, as its run evaluated it; empty if it did not."""
        with suppress(AttributeError, KeyError, OverflowError, TypeError, ValueError):
            scores = islice(self.facts.get(EVALUATION, {}).items(), MOST_EVALUATIONS)
            return {
                name[:64]: {each: None if score[each] is None else float(score[each]) for each in INTERVAL}
                for name, score in scores
            }
        return {}

    def check_base(self, weights: str, *, who: str, ours: str, where: str, fix: str) -> None:
        """Checks the base. An adapter that does not record its base passes.

        Args:
            weights: digest of the base's files.
            who, ours: names of the adapter and of this base.

        Raises:
            ModelError: (66) the adapter was trained on another base, or on the same base in another format.
        """
        theirs = self.base_weights
        if theirs not in (None, weights):
            raise ModelError(
                f"{who} was trained on another base ({str(theirs)[:19]}…, {ours} {weights[:19]}…)", where=where, fix=fix
            )

    @property
    def scaling(self) -> float:
        """The factor of LoRA's product."""
        root = self.rank**0.5 if self.config.get("use_rslora") else self.rank
        return float(self.config["lora_alpha"]) / root

    def modules(self) -> tuple[str, ...]:
        """The adapted modules as the file names them; those of routed experts as in `adapters.files`."""
        return tuple(dict.fromkeys(module_of(name)[0] for name in sorted(self.header.tensors)))

    def layers(self) -> tuple[str, ...]:
        """The adapted layers under the model's own names; a projection of all routed experts is one."""
        return tuple(dict.fromkeys(self._place(name)[0] for name in sorted(self.header.tensors)))

    @property
    def expert_layout(self) -> ExpertLayout:
        """How routed experts share the adapter, by names and shapes; `None` if it has none of them."""
        layouts: set[ExpertLayout] = {"None"}
        for name, info in self.header.tensors.items():
            layer, expert = self._place(name)
            if expert is not None:
                layouts.add("PerExpert")
            elif len(info.shape) == 3 and info.shape[0] > 1:
                layouts.add("PerExpert" if is_outer(layer, module_of(name)[1]) else "SharedOuter")
            elif len(info.shape) == 3:
                layouts.add("Shared")
        return max(layouts, key=EXPERT_LAYOUTS.index)

    def _place(self, tensor: str) -> tuple[str, int | None]:
        return layer_of(module_of(tensor)[0], is_stacked=len(self.header.tensors[tensor].shape) == 3)


def module_of(tensor: str) -> tuple[str, str]:
    """`base_model.model.<module>.lora_A.weight` → (module, `lora_A`)."""
    module, _, kind = tensor.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
    return module, kind


def is_adapter(store: Store) -> bool:
    return store.exists(CONFIG_FILE)


def split_address(uri: str) -> tuple[str, str | None]:
    """Example: `split_address("runs/a@best") == ("runs/a", "best")`; None after any other address."""
    found = re.fullmatch(r"(.+?)/?@(best|newest|step-\d+)", uri)
    return (found[1], found[2]) if found else (uri, None)


def adapter_address(uri: str) -> tuple[str, str] | None:
    """The location of an adapter's folder, or of an adapter in a run folder, and why it is this one.

    `RUN@best` is the best that an evaluation found, `RUN@newest` the newest, `RUN@step-12` that of a step, and `RUN`
    the best of a run that has evaluated, else the newest. None if there is none.

    Raises:
        UsageError: the run does not keep that step, or has no best.
    """
    store = open_store(uri, writable=False)
    if is_adapter(store):
        return uri, ""
    run, named = split_address(uri)
    store = open_store(run, writable=False) if named else store
    if named and named.startswith("step-"):
        (kept,) = saved_steps(store, [int(named.removeprefix("step-"))], first=True, option=f"@{named}")
        return kept.uri, f"{named} of its run"
    names = list_bundles(store, ADAPTERS)
    if named != "newest" and (best := find_best(store)):
        said = f"the best of its run, {best[0].evaluation} {best[0].value:.3f} at step {best[0].step}"
        return f"{run.rstrip('/')}/{ADAPTERS}{adapter_name(best[0].step)}", said
    if named == "best" and names and not _writes_only_best(store):
        raise UsageError(
            "no adapter that this run keeps was evaluated, so none is its best",
            where=uri,
            fix=f"name {run}@newest; `spec.evaluation.everySteps` makes a run evaluate",
        )
    return (f"{run.rstrip('/')}/{names[0].rstrip('/')}", "the newest of its run") if names else None


def _writes_only_best(store: Store) -> bool:
    """Whether the run measures on held-out demonstrations: its newest adapter is then the best."""
    return bool(((read_run_file(store) or {}).get("resolved") or {}).get("spec", {}).get("data", {}).get("validation"))


def find_adapter(uri: str) -> AdapterFolder | None:
    """The adapter at an address, each file checked against the manifest's digest if there is one; None without any.

    Raises:
        ModelError: a file is missing or changed, or Orbit does not support the adapter.
        UsageError: see `adapter_address`.
    """
    if (found := adapter_address(uri)) is None:
        return None
    place, chosen = found
    return replace(read_adapter(open_store(place, writable=False)), chosen=chosen)


def open_adapter(uri: str) -> AdapterFolder:
    """The adapter at an address, as `find_adapter` reads it.

    Raises:
        ModelError, UsageError: also if there is none.
    """
    return find_adapter(uri) or read_adapter(open_store(uri, writable=False))


def read_adapter(store: Store) -> AdapterFolder:
    """`open_adapter` for an open store, whose root is the adapter's folder."""
    config = _parse(bytes(_view(store, CONFIG_FILE)), store, CONFIG_FILE)
    files: dict[str, Buffer] = {CONFIG_FILE: store.get(CONFIG_FILE), MODEL_FILE: _view(store, MODEL_FILE)}
    if config.get("peft_type") == "OFT" and store.exists(ROTATIONS_FILE):
        files[ROTATIONS_FILE] = store.view(ROTATIONS_FILE)
    manifest = _parse(store.get("manifest.json"), store, "manifest.json") if store.exists("manifest.json") else {}
    _check_digests(store, files, manifest)
    # Rotations are Orbit's, which keeps parameters within COFT's limit; PEFT moves them there in each pass.
    _check_config(store, config if ROTATIONS_FILE not in files else {**config, "coft": False})
    adapter = build_adapter(store.uri, files, dict(manifest.get("facts") or {}))
    _check_names(adapter)
    return adapter


def build_adapter(place: str, files: Mapping[str, Buffer], facts: Mapping[str, Any] | None = None) -> AdapterFolder:
    """An adapter from files that were checked when they were read. Args: place: for messages."""
    data = files[MODEL_FILE]
    header = parse_header(data, size=memoryview(data).nbytes, where=f"{place}/{MODEL_FILE}")
    return AdapterFolder(place, json.loads(bytes(files[CONFIG_FILE])), files, header, facts or {})


def describe_adapter(adapter: AdapterFolder) -> dict[str, Any]:
    """The facts that `orbit inspect` reports about an adapter."""
    shapes = [info.shape for info in adapter.header.tensors.values()]
    layers = adapter.layers()
    targets = Counter(layer.rpartition(".")[2] for layer in layers)
    facts: dict[str, Any] = {
        "kind": "adapter",
        "place": adapter.place,
        "type": adapter.type,
        "rank" if adapter.type == "LoRA" else "block_size": adapter.rank,
        "modules": len(layers),
        "experts": adapter.expert_layout,
        "targets": dict(sorted(targets.items())),
        "parameters": sum(map(prod, shapes)),
        "bytes": sum(memoryview(data).nbytes for data in adapter.files.values()),
        "base_model": adapter.config.get("base_model_name_or_path"),
        "base_weights": adapter.base_weights,
        "policy_version": adapter.facts.get("version"),
        "digest": adapter.facts.get("digest"),
        "has_rotations": ROTATIONS_FILE in adapter.files,
    }
    if adapter.type == "LoRA":
        facts["scaling"] = adapter.scaling
    else:
        facts["parametrization"] = adapter.parametrization
    return facts


def _view(store: Store, name: str) -> Buffer:
    try:
        return store.view(name)
    except NotFound:
        is_here = "://" in store.uri or Path(store.uri).is_dir()
        raise ModelError(
            f"the folder holds no {name}" if is_here else "there is no such folder",
            where=store.uri,
            fix="name the folder of one kept adapter, such as runs/<run>/adapters/policy-v12",
        ) from None


def _parse(data: bytes, store: Store, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ModelError(f"not JSON: {error}", where=f"{store.uri}/{name}", fix="copy the adapter again") from None
    if not isinstance(value, dict):
        raise ModelError("not a JSON object", where=f"{store.uri}/{name}", fix="copy the adapter again")
    return value


def _check_digests(store: Store, files: Mapping[str, Buffer], manifest: Mapping[str, Any]) -> None:
    parts = manifest.get("parts")
    for name, part in parts.items() if isinstance(parts, dict) else ():
        if name not in files:
            raise ModelError(f"{name} is missing", where=store.uri, fix="copy the adapter again")
        try:
            pieces = read_pieces(part)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ModelError("not a manifest", where=f"{store.uri}/{MANIFEST}", fix="copy the adapter again") from None
        if first_difference(files[name], pieces) is not None:
            raise ModelError(
                "the file was changed: its SHA-256 is not the manifest's",
                where=f"{store.uri}/{name}",
                fix="copy the adapter again",
            )


def _check_config(store: Store, config: Mapping[str, Any]) -> None:
    where = f"{store.uri}/{CONFIG_FILE}"
    if config.get("peft_type") not in TYPES:
        raise ModelError(f"peft_type is {config.get('peft_type')!r}", where=where, fix="use a LoRA or an OFT adapter")
    for key in sorted(config.keys() - NEUTRAL_FIELDS):
        if (value := config[key]) and value not in PLAIN.get(key, ()):
            raise ModelError(
                f"Orbit does not compute with {key} = {value!r}",
                where=where,
                fix="its base was changed when it was made: save it in PEFT as plain LoRA, by `save_pretrained` with "
                "path_initial_model_for_weight_conversion"
                if key == "init_lora_weights"
                else "train it without that setting, or merge it into its base by PEFT and use that as the model",
            )
    for key in ("r", "lora_alpha") if config["peft_type"] == "LORA" else ("oft_block_size",):
        if not isinstance(config.get(key), int | float) or config[key] <= 0:
            raise ModelError(f"{key} is {config.get(key)!r}", where=where, fix="copy the adapter again")


def _check_names(adapter: AdapterFolder) -> None:
    """Checks that every module has the tensors of its type, of the rank or block size that the configuration names."""
    where = f"{adapter.place}/{MODEL_FILE}"
    kinds = ("lora_A", "lora_B") if adapter.type == "LoRA" else ("oft_R",)
    tensors = adapter.header.tensors
    for name in sorted(tensors):
        if module_of(name)[1] not in kinds:
            raise ModelError(f"the tensor {name} belongs to no {adapter.type} adapter", where=where, fix=COPY)
    for module in adapter.modules():
        infos = [tensors.get(f"{PREFIX}{module}.{kind}.weight") for kind in kinds]
        shapes = [info.shape for info in infos if info is not None]
        of_experts = module.rpartition(".")[0].endswith("experts") and all(len(shape) == 3 for shape in shapes)
        if len(shapes) < len(kinds) or not (of_experts or all(len(shape) == 2 for shape in shapes)):
            raise ModelError(f"{module} lacks one of {', '.join(kinds)}, or it is not a matrix", where=where, fix=COPY)
        if adapter.type == "LoRA" and shapes[0][-2] != shapes[1][-1]:
            raise ModelError(f"lora_A and lora_B of {module} have different ranks", where=where, fix=COPY)
        # Of a block of b by b, OFT keeps the numbers above the diagonal.
        width = shapes[0][-2] if adapter.type == "LoRA" else shapes[0][-1]
        wanted = adapter.rank if adapter.type == "LoRA" else adapter.rank * (adapter.rank - 1) // 2
        if width != wanted:
            what = "rank" if adapter.type == "LoRA" else "blocks of size"
            found = width if adapter.type == "LoRA" else (1 + isqrt(1 + 8 * width)) // 2
            raise ModelError(
                f"{module} has {what} {found}, and {CONFIG_FILE} says {adapter.rank}", where=where, fix=COPY
            )
        if of_experts and len({shape[0] for shape in shapes} - {1}) > 1:
            raise ModelError(f"the tensors of {module} are of different numbers of experts", where=where, fix=COPY)


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter, and the name that it has here."""

    name: str
    uri: str


def saved_steps(
    store: Store, steps: Sequence[int] | None, *, first: bool, option: str = "--steps"
) -> list[NamedAdapter]:
    """The adapters that a run kept, by step: the requested ones, or all.

    Args:
        first: whether to include step 0 if no steps are given; its adapter is not the bare base.
        option: the option of the command line that named the steps.

    Raises:
        UsageError: the folder holds no adapter, or lacks a requested one.
    """
    kept = sorted(int(name.rstrip("/").rpartition("policy-v")[2]) for name in list_bundles(store, ADAPTERS))
    if not kept:
        raise UsageError(
            "this folder holds no adapter", where=store.uri, fix="name the folder of a run that has started"
        )
    lacking = sorted({*(steps or ())} - {*kept})
    if lacking:
        raise UsageError(
            f"the run keeps no adapter of step {', '.join(map(str, lacking))}; it keeps: {', '.join(map(str, kept))}",
            where=f"{store.uri}, {option}",
            fix="choose from those; a larger spec.checkpoint.keep keeps more",
        )
    wanted = [step for step in kept if step or first] if steps is None else sorted({*steps})
    return [NamedAdapter(f"step-{step}", f"{store.uri}/{ADAPTERS}{adapter_name(step)}") for step in wanted]
