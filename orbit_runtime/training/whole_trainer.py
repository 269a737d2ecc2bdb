"""The trainer of a model whose own weights are trained, in this process.

Belongs here: publishing and checkpoints of the whole model. Does not belong here: the arithmetic of a step
(`updater`), loading (`policy.whole`), the other files of a model's folder (`loop`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Buffer, Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from orbit_runtime.adapters.tensorfile import build
from orbit_runtime.digests import cut
from orbit_runtime.errors import InternalError
from orbit_runtime.policy.model import Policy
from orbit_runtime.policy.packed import Branch
from orbit_runtime.policy.whole import WholeMasters
from orbit_runtime.training.passes import LocalPasses
from orbit_runtime.training.settings import TrainerSettings
from orbit_runtime.training.state import PART, build_state, unpack_state
from orbit_runtime.training.updater import Updater
from orbit_runtime.types import AdapterManifest, AdapterSink, Sample, Scored, StateWriter, UpdateResult

SHARD_BYTES = 5 * 10**9
"""Maximum file size, as Hugging Face's writers use; a larger tensor has a file of its own."""
INDEX_FILE = "model.safetensors.index.json"


class WholeTrainer:
    """A `Trainer` without a base: it publishes the model itself."""

    def __init__(
        self,
        policy: Policy,
        settings: TrainerSettings,
        loss: Callable[..., Any],
        *,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        masters = policy.whole
        assert isinstance(masters, WholeMasters)
        self._policy, self._masters, self._shard_bytes = policy, masters, shard_bytes
        self._updater = Updater(LocalPasses(policy), settings, loss)

    def update(self, samples_D: Sequence[Sample]) -> UpdateResult:
        return self._updater.update(samples_D)

    def logprobs(self, samples_D: Sequence[Sample]) -> list[array[float]]:
        columns = self._updater.logprobs(samples_D)
        return [columns[index] for index in range(len(samples_D))]

    def reference_logprobs(self, samples_D: Sequence[Sample]) -> list[array[float]]:
        raise InternalError("a model that trains as a whole keeps no base to compare with")

    values = teacher_logprobs = reference_logprobs

    def score(self, token_ids_T: Sequence[int]) -> tuple[Scored, Scored]:
        """Both results are the model's: there is no adapter to remove."""
        batch = self._policy.pack([Branch(0, tuple(token_ids_T[:1]), tuple(token_ids_T[1:]))])
        with torch.no_grad(), self._policy.injected.selection.use(None):
            logprobs, top = self._policy.scores(batch)
        scored = Scored((0.0, *logprobs.tolist()), None, top_T=(-1, *top.tolist()))
        return scored, scored

    def publish(self, sink: AdapterSink) -> AdapterManifest:
        """BF16 safetensors under Hugging Face's tensor names, with an index if there are several files."""
        shards = [*self._shards()]
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

    def _shards(self) -> Iterator[dict[str, Tensor]]:
        shard: dict[str, Tensor] = {}
        size = 0
        for name, tensor in self._masters.published().items():
            if shard and size + 2 * tensor.numel() > self._shard_bytes:
                yield shard
                shard, size = {}, 0
            shard[name] = tensor
            size += 2 * tensor.numel()
        yield shard

    def save_state(self, writer: StateWriter) -> None:
        updater = self._updater
        updater.let_be_read()
        file = build_state(self._masters.parameters, updater.optimizer, updater.counters)
        writer.write(PART, file.size, file.pieces)
        updater.reader = writer

    def load_state(self, parts: Mapping[str, Buffer]) -> None:
        updater = self._updater
        updater.let_be_read()
        counters = unpack_state(parts[PART], self._masters.parameters, updater.optimizer)
        updater.updates, updater.steps = counters["updates"], counters["steps"]
        self._masters.after_update()


def _index(shards: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    total = sum(2 * tensor.numel() for tensors in shards.values() for tensor in tensors.values())
    places = {name: file for file, tensors in shards.items() for name in tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True).encode()
