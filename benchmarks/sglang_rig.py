"""A trainer, a publisher and a real SGLang server over the shipped model, as in a run.

Belongs here: assembling them. Does not belong here: measuring (`sglang_false_alarms`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.state import export_adapter
from orbit_runtime.algorithms.constants import PolicyLossSettings
from orbit_runtime.checkpoints.convert import convert
from orbit_runtime.checkpoints.target import Target
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.loop.fault_finder import FaultFinder
from orbit_runtime.loop.publish import BackgroundWriter, PolicyVersions, Publication, Publisher
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.parity.liveness import CHANGE_LIMITS
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.rollout.served_engine import ServedEngine, start_engine
from orbit_runtime.rollout.sglang_server import ServerSettings, SGLangServer, lora_targets
from orbit_runtime.rollout.transport import AdapterTransfer, FolderMailbox, Transport
from orbit_runtime.spec.training import Training
from orbit_runtime.storage import claim_execution, open_store
from orbit_runtime.training import TorchTrainer, TrainerSettings
from orbit_runtime.types import AdapterFiles, Sampling

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = {
    "LoRA": AdapterConfig(type="LoRA", targets=TARGETS, rank=16, alpha=32.0),
    "OFT": AdapterConfig(type="OFT", targets=TARGETS, block_size=32),
}
RUNNING = 64
SETTINGS = TrainerSettings(
    Training(steps=1, learning_rate=1e-3, micro_batch_tokens=4096),
    decay_steps=1,
    loss=PolicyLossSettings(),
    reduction="Token",
    constant_length=4,
    correction=None,
    sampling=Sampling(),
    base_model="builtin://tiny-adder",
)


@dataclass
class Rig:
    policy: Policy
    tokenizer: ChatTokenizer
    engine: ServedEngine
    publisher: Publisher
    versions: PolicyVersions
    publication: Publication | None = None

    def move(self, seed: int, scale: float) -> None:
        """Moves every master, as an optimizer update of that size would."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.policy.injected.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)

    def publish(self) -> Publication:
        """Returns when the publish is proven and durable. Raises GateError if it is not proven."""
        version = 0 if self.publication is None else self.publication.adapter.version + 1
        try:
            self.publication = self.publisher.publish(version, self.publication)
        finally:
            self.publisher.keeper.wait()
        self.versions.activate(self.publication)
        return self.publication


def small_lora() -> dict[str, bytes]:
    """Files of a LoRA that every server accepts, including one started for OFT."""
    config = AdapterConfig(type="LoRA", targets=TARGETS, rank=1, alpha=2.0)
    policy = load_policy(builtin_folder("tiny-adder", "INT4"), config)
    return export_adapter(policy.injected, config, SETTINGS.base_model)


class Chosen:
    """The transport being measured; None: files."""

    now: Transport | None = None

    def __call__(
        self, adapter: AdapterFiles, folder: Path, copies: Iterable[str]
    ) -> AbstractContextManager[AdapterTransfer | None]:
        return nullcontext() if self.now is None else self.now(adapter, folder, copies)


@contextmanager
def started(adapter: str, transport: Transport | None = None) -> Iterator[Rig]:
    """Args: adapter: `LoRA` or `OFT`."""
    model, config = builtin_folder("tiny-adder", "INT4"), ADAPTERS[adapter]
    policy, tokenizer = load_policy(model, config), ChatTokenizer(model)
    with TemporaryDirectory(prefix="orbit-sglang-bench-") as scratch:
        folder = Path(scratch)
        convert(model, folder / "base", Target("BF16"), show=lambda *_: None)
        settings = ServerSettings(
            model=folder / "base",
            device="cpu",
            dtype="float32",
            targets=lora_targets(tuple(policy.injected.layers)),
            max_running_requests=RUNNING,
            max_sequence_length=256,
            seed=0,
            lora_rank=config.rank if adapter == "LoRA" else 1,
            oft_block_size=config.block_size if adapter == "OFT" else 0,
        )
        server = SGLangServer(settings, log=folder / "sglang.log")
        try:
            engine = start_engine(
                [server], tokenizer, desk=FolderMailbox(folder / "adapters", transport), max_running_requests=RUNNING
            )
            yield _rig(policy, tokenizer, engine, folder / "run")
            engine.close()
        finally:
            server.stop()


def _rig(policy: Policy, tokenizer: ChatTokenizer, engine: ServedEngine, run: Path) -> Rig:
    store = open_store(str(run))
    execution = claim_execution(store, run_name="bench")
    canary = (*tokenizer.encode_chat([{"role": "user", "content": "12+34="}]), 5, 6, 7)
    limit = CHANGE_LIMITS["float32"]
    trainer = TorchTrainer(policy, SETTINGS)
    bisect = FaultFinder(engine, canary, "float32")
    publisher = Publisher(store, execution, BackgroundWriter(), engine, trainer, canary, limit, "sha256:0", bisect)
    return Rig(policy, tokenizer, engine, publisher, PolicyVersions(engine))
