"""Maps model names to adapters: loading one, proving it live, and releasing its predecessor; replacing the base.

Belongs here: names, slots, the proof without a trainer. Does not belong here: the proof's checks (`parity`), whether a
whole model may take the base's place (`checkpoints`).

A name changes between requests: one in flight ends under the adapter that it began with, whose slot is emptied once
nothing samples from it any more. The base changes in the same way, and so is held twice until the last request that
began on the previous one has ended.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from orbit_runtime.adapters import tensorfile
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.files import CONFIG_FILE, MODEL_FILE, expected_applied_digest, files_digest
from orbit_runtime.adapters.state import config_json
from orbit_runtime.checkpoints.adapter_folder import AdapterFolder, find_adapter, split_address
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import GateError, ModelError, UsageError
from orbit_runtime.model_info.content import weights_digest
from orbit_runtime.parity.liveness import CHANGE_LIMITS, Limits, Proof, check_proofs, prove
from orbit_runtime.policy.model import Policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.ports.guard import APIError
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.torch_engine import ReplaceableEngine
from orbit_runtime.serve.checkpoints import ModelFolder, ModelProof, check_checkpoint, load_checked, prove_checkpoint
from orbit_runtime.serve.names import POLICY, ServedModel
from orbit_runtime.storage import open_store
from orbit_runtime.storage.inputs import fetch_input
from orbit_runtime.types import AdapterFiles, Engine, Scored

CANARY_TOKENS = 48
CANARY = "Name three rivers of Africa, then add 17 and 26."
Measured = tuple[tuple[float, ...], tuple[float, ...]]
"""Log-probs of the canary with the adapter and without."""


@dataclass(frozen=True)
class BaseReplacement:
    """Parts needed to replace the base."""

    folder: Path
    """Folder of the model that the server started with."""
    engine: ReplaceableEngine
    load: Callable[[Path], Policy]
    build: Callable[[Policy], TorchEngine]


@dataclass(frozen=True)
class Base:
    """The frozen model under every adapter."""

    name: str
    place: str
    tokenizer: ChatTokenizer
    config: AdapterConfig
    """Config of every adapter that can be served with it."""
    weights: str
    """Digest of its files."""
    vocabulary: int
    compute_dtype: str
    """`float32` or `bfloat16`."""
    policy: Policy | None
    """The model in this process; None if servers hold it."""
    most_adapters: int | None = None
    """Maximum number of adapters that the engine holds; None for as many as fit its memory."""
    replacing: BaseReplacement | None = None
    """None if servers hold the model, so that this process cannot replace it."""


class Policies:
    """The models of one server. Every method may be called from any thread."""

    def __init__(self, base: Base, engine: Engine, sources: Sequence[str], *, most: int = 64) -> None:
        """
        Args:
            sources: folders and addresses from which adapters may be loaded at run time.
            most: maximum number of names.
        """
        self.base = base
        """The model that answers now."""
        self._first = replace(base, policy=None)
        """The model that the server started with."""
        self._engine = engine
        self._sources = tuple(sources)
        self._most = most
        self._lock = threading.Lock()
        """Held while a request gets its slot, and while a name changes."""
        self._updating = threading.Lock()
        self._sweeping = threading.Lock()
        self._served = {base.name: ServedModel(base.name, None, base.place, digest=base.weights)}
        self._loads = 0
        self.retired: list[str] = []
        """Slots without a name that are not empty yet."""

    def all(self) -> list[ServedModel]:
        return [*self._served.values()]

    def find(self, name: str) -> ServedModel | None:
        return self._served.get(name)

    @contextmanager
    def slot_of(self, name: str) -> Iterator[str | None]:
        with self._lock:
            yield self._served[name].slot

    def load(self, name: str, uri: str) -> tuple[ServedModel, Proof]:
        """Loads an adapter, proves it live and puts it under `name`. On failure `name` stays what it was.

        Raises:
            ModelError: a file is missing or damaged, or the adapter is for another base or of another kind.
            GateError: the engine does not compute with the files' content.
            UsageError: the name is that of the base.
        """
        if name == self.base.name:
            raise UsageError(f"{name!r} is the base, which never changes", fix=f"use another name, such as {POLICY!r}")
        folder = open_policy(uri)
        with self._updating:
            adapter = self._adapter(folder)
            self.sweep()
            self._check_room(name)
            self._loads += 1
            # A name that every engine accepts, also in a URL and as a folder name.
            slot = f"{re.sub('[^A-Za-z0-9_.]', '_', name)[:64]}-{self._loads}"
            with self._slot_filled(slot, adapter):
                proof = self._prove(slot, adapter, folder.facts)
            of_run = folder.facts.get("version"), adapter.digest, folder.chosen, folder.run, folder.evaluation
            served = ServedModel(name, slot, folder.place, *of_run)
            self._switch(served)
        return served, proof

    def load_checkpoint(self, uri: str) -> dict[str, Any]:
        """Loads a whole model beside the base, proves it and puts it in the base's place; returns the response.

        Raises:
            ModelError: the folder is incomplete or damaged, or the model differs from the base in more than its values.
            GateError: the engine does not compute with the files' content.
            APIError: (409) adapters are served over the base, or the one before it still answers; (400) servers hold
                the model.
        """
        if self.base.replacing is None:
            raise APIError(
                400,
                "SGLang's servers hold the model, and this server replaces only adapters in them: serve this model "
                "with a server of its own (orbit serve --model FOLDER --engine SGLang)",
                param="checkpoint",
                code="unsupported",
            )
        folder = fetch_input(uri, "model", "checkpoint").path
        with self._updating:
            found = check_checkpoint(folder, self.base.replacing.folder, self.base.tokenizer)
            served, proof = self._replace_base(uri, found, weights_digest(folder))
        return {**served.to_json(), "tokenizer": found.tokenizer, "proof": proof.to_json()}

    def reset(self, name: str) -> dict[str, Any]:
        """Puts the base under `name`, and the model that the server started with under the base's own name. Returns the
        response.

        Raises: see `load_checkpoint`.
        """
        if name not in self._served:
            raise UsageError(f"there is no model {name!r}")
        with self._updating:
            first = self._first
            if name == self.base.name and self.base.weights != first.weights:
                assert first.replacing is not None
                weights = weights_digest(first.replacing.folder)
                if weights != first.weights:
                    raise ModelError(
                        "the files of the model that this server started with were changed since",
                        where=str(first.replacing.folder),
                        fix="restore them, or start the server again",
                    )
                served, proof = self._replace_base(
                    first.place, ModelFolder(first.replacing.folder, None, "same"), weights
                )
                return {**served.to_json(), "proof": proof.to_json()}
            served = self._served[name]
            if served.slot is not None:
                served = replace(self._served[self.base.name], name=name)
                self._switch(served)
        return served.to_json()

    def _replace_base(self, place: str, found: ModelFolder, weights: str) -> tuple[ServedModel, ModelProof]:
        """Loads and proves these weights, and puts them in the base's place; on failure the base stays."""
        replacing = self.base.replacing
        assert replacing is not None
        adapted = [served.name for served in self._served.values() if served.slot is not None]
        if adapted:
            raise APIError(
                409,
                f"adapters are served over this base: {', '.join(adapted)}; put each of these names back first "
                "(/reload_weights with `model`)",
                code="adapters_served",
            )
        try:
            replacing.engine.check_replaceable()
        except GateError as error:
            raise APIError(409, str(error), code="still_answering") from None
        policy = load_checked(replacing.load, found.folder)
        engine = replacing.build(policy)
        limit = CHANGE_LIMITS[self.base.compute_dtype]
        proof = prove_checkpoint(engine, policy, found.folder, self._canary(), limit=limit)
        served = ServedModel(self.base.name, None, place, found.version, weights)
        with self._sweeping, self._lock:
            replacing.engine.replace(engine)
            self.base = replace(self.base, place=place, weights=weights, policy=policy)
            # Names that stand for the base follow it; slots without a name go with the previous engine.
            self._served = {name: replace(served, name=name) for name in self._served}
            self.retired.clear()
        replacing.engine.let_go()
        return served, proof

    def check_source(self, uri: str, field: str = "adapter") -> None:
        """Raises UsageError if the server may not load weights from there. Args: field: of the request."""
        if not any(_is_within(split_address(uri)[0], source) for source in self._sources):
            raise UsageError(
                f"this server does not load {field}s from there",
                where=field,
                fix="start it with --updates-from and a folder that holds it",
            )

    def sweep(self) -> None:
        """Empties slots that have no name and from which nothing samples. May take a while with servers, so the front
        is told first which adapter a name stands for now."""
        with self._sweeping:
            for slot in [*self.retired]:
                # Refused until the last of its requests has ended.
                with suppress(GateError):
                    self._engine.unload_adapter(slot)
                    self.retired.remove(slot)

    def _switch(self, served: ServedModel) -> None:
        with self._lock:
            before = self._served.get(served.name)
            self._served[served.name] = served
            if before is not None and before.slot is not None:
                self.retired.append(before.slot)

    def _check_room(self, name: str) -> None:
        """Raises ModelError if there are too many names, or the engine is full: it would drop an adapter by itself."""
        if name not in self._served and len(self._served) >= self._most:
            raise ModelError(
                f"{len(self._served)} models are served, and at most {self._most} may be",
                fix="give one of their names this adapter, or start the server with a larger --limit models",
            )
        most, held = self.base.most_adapters, len(self._engine.adapters())
        if most is not None and held >= most:
            raise ModelError(
                f"the engine holds {held} adapters, as many as it can",
                fix="serve fewer names, or wait until requests under adapters that were replaced have ended",
            )

    @contextmanager
    def _slot_filled(self, slot: str, adapter: AdapterFiles) -> Iterator[None]:
        self._engine.load_adapter(slot, adapter)
        try:
            yield
        except BaseException:
            self._engine.unload_adapter(slot)
            raise

    def _adapter(self, folder: AdapterFolder) -> AdapterFiles:
        folder.check_base(
            self.base.weights,
            who="the adapter",
            ours="this one is",
            where=folder.place,
            fix="serve it over the base that it was trained on",
        )
        config = config_of(folder)
        if _kind(config) != _kind(self.base.config):
            raise ModelError(
                f"the adapter is {_words(config)}, and this server's are {_words(self.base.config)}",
                where=folder.place,
                fix="serve it with a separate server",
            )
        files = folder.files
        if not folder.facts and config.type == "LoRA":
            # Written by another library, maybe in fp32 and with settings that Orbit does not need.
            tensors = tensorfile.parse(files[MODEL_FILE], where=MODEL_FILE)
            name = str(folder.config.get("base_model_name_or_path"))
            files = {
                CONFIG_FILE: config_json(self.base.config, name),
                MODEL_FILE: tensorfile.dump(
                    {key: tensor.bfloat16() for key, tensor in tensors.items()}, torch.bfloat16
                ),
            }
        digest = files_digest(files)
        said = folder.facts.get("digest")
        if said not in (None, digest):
            raise ModelError(
                f"the files' digest is {digest[:19]}…, and the publish wrote {str(said)[:19]}…", where=folder.place
            )
        return AdapterFiles(int(folder.facts.get("version") or 0), files, digest)

    def _prove(self, slot: str, adapter: AdapterFiles, facts: Mapping[str, Any]) -> Proof:
        """Proves it on every copy; returns the proof with the smallest margin to its limit."""
        expected = expected_applied_digest(adapter.files)
        limits = Limits(CHANGE_LIMITS[self.base.compute_dtype], math.inf)
        proofs = []
        canary_T, scores = _recorded(facts, self.base.vocabulary) or self._measured(slot)
        for copy in self._engine.copies():
            if scores is None and not copy.reads_back:
                raise GateError(
                    f"no trainer recorded what this adapter does, and {copy.name} cannot read back its "
                    "slots: nothing could be proven",
                    where="publish",
                    fix="serve an adapter of a run, or servers with Orbit's plug-in",
                )
            trainer = scores and (Scored(scores[0], expected), Scored(scores[1], None))
            proof, _ = prove(adapter, slot, copy, trainer, canary_T, limits=limits, previous=None, expected=expected)
            proofs.append(proof)
        check_proofs(proofs)
        for proof in proofs:
            if not proof.may_run:
                raise GateError(f"{proof.engine}: {'; '.join(proof.unresolved)}", where="publish")
        return max(proofs, key=lambda proof: proof.change_error)

    def _canary(self) -> tuple[int, ...]:
        ids = self.base.tokenizer.encode_chat([{"role": "user", "content": CANARY}])[-CANARY_TOKENS:]
        return (*ids, *ids[:4])

    def _measured(self, slot: str) -> tuple[tuple[int, ...], Measured | None]:
        """Measures an adapter that has no canary from a trainer: if the model is in this process, its training passes
        replace the trainer's.
        """
        canary_T = self._canary()
        policy = self.base.policy
        if policy is None:
            return canary_T, None
        batch = policy.pack([Branch(0, canary_T[:1], canary_T[1:])])
        found = []
        for name in (slot, None):
            with torch.no_grad(), policy.injected.selection.use(name):
                found.append((0.0, *policy.logprobs(batch)[0].tolist()))
        return canary_T, (found[0], found[1])


def open_policy(uri: str) -> AdapterFolder:
    """Opens the adapter at an address.

    Raises:
        ModelError: there is none, or it is damaged.
        UsageError: see `adapter_address`.
    """
    found = find_adapter(uri)
    if found is None and open_store(uri, writable=False).exists("config.json"):
        raise ModelError(
            "this is a whole model, not an adapter",
            where=uri,
            fix="send it to /update_weights as `checkpoint`, or serve it with a server of its own: orbit serve --model "
            "FOLDER",
        )
    if found is None:
        raise ModelError("there is no adapter, and no run folder with one", where=uri, fix="name an adapter's folder")
    return found


def config_of(folder: AdapterFolder) -> AdapterConfig:
    """The config that a base's layers need to hold this adapter."""
    fields = folder.config
    asked = fields.get("target_modules")
    if isinstance(asked, Sequence) and not isinstance(asked, str):
        targets = tuple(sorted(map(str, asked)))
    else:
        # A PEFT expression: the tensors show what it matched.
        targets = tuple(sorted({module.rpartition(".")[2] for module in folder.modules()}))
    if folder.type == "LoRA":
        return AdapterConfig(
            type="LoRA",
            targets=targets,
            rank=int(fields["r"]),
            alpha=float(fields["lora_alpha"]),
            rslora=bool(fields.get("use_rslora")),
            dropout=float(fields.get("lora_dropout") or 0.0),
        )
    return AdapterConfig(
        type="OFT",
        targets=targets,
        block_size=int(fields["oft_block_size"]),
        parametrization=folder.parametrization,
        neumann_terms=folder.neumann_terms,
        coft=bool(fields.get("coft")),
        coft_eps=float(fields.get("eps") or 6e-5),
    )


def _kind(config: AdapterConfig) -> tuple[Any, ...]:
    """Properties that two adapters over one base must share; targets are checked by the tensors' names."""
    own = (config.rank, config.scaling) if config.type == "LoRA" else (config.block_size, config.parametrization)
    return config.type, *own


def _words(config: AdapterConfig) -> str:
    if config.type == "LoRA":
        return f"LoRA of rank {config.rank}, scaled by {config.scaling:g}"
    return f"OFT in blocks of {config.block_size}, {config.parametrization}"


def _recorded(facts: Mapping[str, Any], vocabulary: int) -> tuple[tuple[int, ...], Measured] | None:
    """The trainer's measurements when it published; None if it recorded nothing.

    Raises:
        ModelError: the record is invalid.
    """
    canary = facts.get("canary")
    if canary is None:
        return None
    try:
        ids = tuple(int(token) for token in canary["token_ids"])
        adapted = tuple(float(value) for value in canary["logprobs"])
        base = tuple(float(value) for value in canary["base_logprobs"])
    except (TypeError, KeyError, ValueError):
        raise ModelError("the manifest's canary is invalid", fix="copy the adapter again") from None
    is_whole = len(ids) > 1 and len(ids) == len(adapted) == len(base)
    if not is_whole or not all(0 <= token < vocabulary for token in ids) or not all(map(math.isfinite, adapted + base)):
        raise ModelError("the manifest's canary is not one of this model", fix="copy the adapter again")
    return ids, (adapted, base)


def _is_within(uri: str, source: str) -> bool:
    if "://" in source and not source.startswith("file://"):
        return ".." not in uri.split("/") and f"{uri.rstrip('/')}/".startswith(f"{source.rstrip('/')}/")
    if "://" in uri and not uri.startswith("file://"):
        return False
    try:
        inner, outer = (Path(each.removeprefix("file://")).expanduser().resolve() for each in (uri, source))
    except (OSError, RuntimeError, ValueError):
        # Links that lead to each other, or a home that is not known.
        return False
    return inner.is_relative_to(outer)
