"""Engines that lose the adapter on its way, each in one of the ways that real stacks did.

A fake on purpose: a healthy engine does none of this. It wraps a real torch engine and spoils what passes through.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from safetensors.torch import load, save

from orbit_runtime.adapters.layer import AdaptedLinear
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.types import AdapterFiles, Completion, Request, Scored, ServerReading

MODEL = "adapter_model.safetensors"
Spoil = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def drop_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in sorted(tensors)[1:]}


def zero_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    victim = next(name for name in sorted(tensors) if tensors[name].any())
    return tensors | {victim: torch.zeros_like(tensors[victim])}


def wrong_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("base_model.model.", "base_model.", 1): tensor for name, tensor in tensors.items()}


def swap_two(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Two tensors of one shape and different content change places."""
    names = sorted(tensors)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            if tensors[first].shape == tensors[second].shape and not torch.equal(tensors[first], tensors[second]):
                return tensors | {first: tensors[second], second: tensors[first]}
    raise AssertionError("no two different tensors of one shape")


class FaultyEngine:
    """Behaves until `spoil` is set. It reads files leniently: what it does not understand it leaves at zero."""

    def __init__(self, engine: TorchEngine, layers: Mapping[str, AdaptedLinear]) -> None:
        self.engine = engine
        self.layers = layers
        self.spoil: Spoil | None = None
        self.strict = False
        """Hand spoiled files to the engine as they are, instead of loading them leniently."""
        self.stale = False
        self.never_switches = False
        self._last: AdapterFiles | None = None
        self._serving: str | None = None

    def load_adapter(self, name: str, adapter: AdapterFiles) -> None:
        given = adapter
        if self.spoil is not None:
            spoiled = self.spoil(load(bytes(adapter.files[MODEL])))
            if not self.strict:
                whole = load(bytes(adapter.files[MODEL]))
                spoiled = {key: spoiled.get(key, torch.zeros_like(tensor)) for key, tensor in whole.items()}
            given = AdapterFiles(adapter.version, {**adapter.files, MODEL: save(spoiled)}, adapter.digest)
        if self.stale and self._last is not None:
            given = replace(self._last, version=adapter.version)
        self.engine.load_adapter(name, given)
        self._last = adapter
        if self._serving is None or not self.never_switches:
            self._serving = name

    def unload_adapter(self, name: str) -> None:
        if not self.never_switches:
            self.engine.unload_adapter(name)

    @property
    def name(self) -> str:
        return "the engine"

    @property
    def reads_back(self) -> bool:
        return True

    def copies(self) -> tuple[FaultyEngine, ...]:
        return (self,)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def read_servers(self) -> Sequence[ServerReading]:
        return self.engine.read_servers()

    def adapter_digest(self, name: str) -> str:
        return self.engine.adapter_digest(name)

    def explain_slot(self, name: str, published: AdapterFiles) -> str:
        return self.engine.explain_slot(name, published)

    def adapters(self) -> tuple[str, ...]:
        return self.engine.adapters()

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit([replace(request, adapter=self._name(request.adapter)) for request in requests])

    def completions(self) -> AsyncGenerator[Completion]:
        return self.engine.completions()

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        self.engine.abort(request_ids)

    def score(
        self,
        token_ids_T: Sequence[int],
        adapters: Sequence[str | None],
        prefix_length: int | None = None,
        standing: Sequence[str] = (),
    ) -> list[Scored]:
        return self.engine.score(token_ids_T, [self._name(name) for name in adapters], prefix_length, standing)

    def close(self) -> None:
        self.engine.close()

    def _name(self, name: str | None) -> str | None:
        return name if name is None or not self.never_switches else self._serving
