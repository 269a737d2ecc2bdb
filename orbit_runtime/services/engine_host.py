"""The inference process with the torch engine: runs the orchestrator's calls on the same torch
engine as `orbit run`.
"""

from __future__ import annotations

from collections.abc import Buffer, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from orbit_runtime.adapters.foreign import load_foreign
from orbit_runtime.adapters.inject import AdaptedLayer
from orbit_runtime.adapters.state import remove_slot
from orbit_runtime.checkpoints.adapter_folder import AdapterFolder
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import UsageError
from orbit_runtime.rollout.torch_engine import TorchEngine
from orbit_runtime.services.host import Host
from orbit_runtime.services.server_host import build_server_host
from orbit_runtime.services.shared_store import SharedStore
from orbit_runtime.services.side_manifest import SideManifest, common_facts, kinds_of
from orbit_runtime.sides.engines import build_torch_engine
from orbit_runtime.sides.machine import rounding_facts
from orbit_runtime.sides.trainers import build_policy
from orbit_runtime.storage import Part
from orbit_runtime.types import AdapterFiles, Completion

Operation = tuple[str, Sequence[Any]]
"""`submit` with requests, or `abort` with their ids."""


class EngineCalls:
    """Calls of an engine, for one thread."""

    def __init__(
        self, build: Callable[[], TorchEngine], layers: Mapping[str, AdaptedLayer], teacher: AdapterFolder | None
    ) -> None:
        self._build = build
        self._layers = layers
        self._teacher = teacher
        self._engine = build()
        self._depot = SharedStore()

    def reset(self) -> None:
        self._engine.abort()
        while self._engine.advance():
            pass
        self._engine.close()
        # Names retired in one session are new in the next.
        self._engine = self._build()

    def advance(self, operations: Sequence[Operation], steps: int) -> list[Completion]:
        """Completions that ended within `steps` batch steps."""
        for kind, given in operations:
            if kind == "submit":
                self._engine.submit(list(given))
            else:
                self._engine.abort(list(given))
        return [completion for _ in range(steps) for completion in self._engine.advance()]

    def load_adapter(self, name: str, version: int, digest: str, files: Mapping[str, Part | Buffer]) -> None:
        self._engine.load_adapter(name, AdapterFiles(version, self._depot.read(files), digest))

    def adopt(self, name: str, version: int) -> None:
        """Loads the teacher for as long as it is used."""
        assert self._teacher is not None, "another teacher than an adapter is not asked"
        load_foreign(self._layers, name, self._teacher.config, self._teacher.files, self._teacher.place)
        self._engine.adopt(name, version)

    def release(self, name: str) -> None:
        self._engine.release(name)
        remove_slot(self._layers, name)

    def explain_slot(self, name: str, version: int, digest: str, files: Mapping[str, Part | Buffer]) -> str:
        return self._engine.explain_slot(name, AdapterFiles(version, self._depot.read(files), digest))

    def calls(self) -> dict[str, Callable[..., Any]]:
        """The calls by name."""
        own = (self._depot.share, self.advance, self.load_adapter, self.adopt, self.release, self.explain_slot)
        return {each.__name__: each for each in own} | {
            # Of the engine at the time of the call: `reset` replaces it.
            "unload_adapter": lambda name: self._engine.unload_adapter(name),
            "score": lambda token_ids_T, adapters: self._engine.score(token_ids_T, adapters),
            "adapter_digest": lambda name: self._engine.adapter_digest(name),
        }


def build_inference_host(asked: SideManifest, address: str, note: Callable[[str], None], closing: ExitStack) -> Host:
    """Builds the host of the torch engine or of SGLang's servers.

    Args:
        address: of the process, and of servers beside it.
        closing: ends the servers.

    Raises:
        OrbitError: the same errors as `orbit run` raises with this manifest before its first step.
    """
    resolved, spec = asked.resolved, asked.resolved.run.spec
    if "inference" not in kinds_of(spec):
        of_endpoints = spec.rollout.engine == "OpenAI"
        raise UsageError(
            "the servers of spec.rollout.endpoints sample" if of_endpoints else "nothing is sampled for demonstrations",
            where="spec.rollout.engine" if of_endpoints else "spec.algorithm.type",
            fix="start `orbit trainer` and `orbit orchestrator` alone",
        )
    if resolved.engine == "SGLang":
        return build_server_host(asked, address, note, closing)
    policy = build_policy(resolved, asked.folder, "None", note)
    tokenizer = ChatTokenizer(asked.folder, spec.data.chat)

    build = partial(build_torch_engine, policy, tokenizer, spec.rollout)
    calls = EngineCalls(build, policy.injected.layers, asked.teacher)
    return Host(common_facts("inference", asked, policy.base_digest(), rounding_facts()), calls.calls(), calls.reset)
