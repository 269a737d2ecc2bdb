"""Every planted fault against publishes to running SGLang servers whose log-probs are as noisy as a GPU's.

    make test-proofs                            all of them, and 500 healthy publishes at each noise
    python -m tests.engines.proof_matrix attached   on servers without our plug-in only

The ordinary tests run `try_fault` for a few. Noise is added inside the server to every log-prob it answers with: most
of it narrow and a tenth four times as wide. Servers are started in pairs; what concerns one concerns the second.

Belongs here: noise, faults, and what proofs may say of them. Does not belong here: starting servers (`servers`).
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

import httpx
import torch
from safetensors.torch import load, save

from orbit_runtime.adapters.files import CONFIG_FILE, MODEL_FILE, ROTATIONS_FILE
from orbit_runtime.errors import GateError
from orbit_runtime.loop.build import build_canary
from orbit_runtime.parity.liveness import CHANGE_LIMITS, Limits, Proof, Reading, prove
from orbit_runtime.parity.statistics import base_limit
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.types import AdapterFiles, Scored
from tests.engines.inside_server import inside_environment, run_inside
from tests.engines.servers import LORA, OFT, Adder, attach, load_adder, plain_servers, server_of, start_server
from tests.fakes.faulty_engine import drop_one, swap_two, zero_one
from tests.integration.engine_inputs import random_adapter

Outcome = Literal["caught", "unproven", "whole", "proven"]
MEANS = (0.01, 0.03)
"""Mean |noise| per token, in nat: what BF16 engines show (`parity/statistics.py`)."""
SCALES = (0.02, 0.05, 0.15)
"""Standard deviation of the adapters' masters: an effect below the noise, one about as large, and one far above it."""
HEALTHY = 500
LIMITS = Limits(CHANGE_LIMITS["bfloat16"], base_limit("INT4", None, "bfloat16"))
CANARY_TOKENS = 512
CONTEXT = 1024

NOISY = """
import torch
processor = manager.base_model.logits_processor
kept = processor.__dict__.setdefault("planted", {{}})
if "noise" in kept:
    kept.pop("noise").remove()
drawn = torch.Generator().manual_seed({seed})
def add_noise(_, __, output):
    x = output.input_token_logprobs
    if x is not None:
        wide = torch.where(torch.rand(x.shape, generator=drawn) < 0.1, 4.0, 1.0)
        x += torch.randn(x.shape, generator=drawn) * wide * {sigma}
        # A softmax never gives more than 1, however it is rounded.
        x.clamp_(max=0.0)
    return output
if {sigma}:
    kept["noise"] = processor.register_forward_hook(add_noise)
"""
IDS = "ids = {each.lora_name: key for key, each in manager.lora_refs.items()}\n"
NEVER_SWITCHED = IDS + (
    "plain = manager.prepare_lora_batch\n"
    "def prepare(batch):\n"
    "    batch.lora_ids = [ids['{before}'] if each == ids['{now}'] else each for each in batch.lora_ids]\n"
    "    plain(batch)\n"
    "manager.prepare_lora_batch = prepare\n"
)
ONE_CACHE = (
    "from sglang.srt.managers.schedule_batch import Req\n"
    "if not hasattr(Req, 'plain_init'):\n"
    "    Req.plain_init = Req.__init__\n"
    "def init(self, *given, **named):\n"
    "    self.plain_init(*given, **named)\n"
    "    self.extra_key = None\n"
    "Req.__init__ = init\n"
)
OWN_CACHES = "from sglang.srt.managers.schedule_batch import Req\nReq.__init__ = Req.plain_init\n"
OTHER_BASE = (
    "layers = manager.base_model.model.layers\n"
    "a, b = (getattr(layers[i].mlp.down_proj, 'base_layer', layers[i].mlp.down_proj).weight.data for i in (1, 2))\n"
    "a_was = a.clone()\na.copy_(b)\nb.copy_(a_was)\n"
)
ROTATION = (
    IDS + "slot = manager.memory_pool.uid_to_buffer_id[ids['{now}']]\n"
    "table = manager.rotations.layers['model.layers.1.mlp.down_proj'].buffer[slot]\n"
)


@dataclass(frozen=True)
class Case:
    """One publish with something wrong."""

    bench: Bench
    before: str
    now: str
    first: AdapterFiles
    second: AdapterFiles


@dataclass(frozen=True)
class Fault:
    """What goes wrong between the publish before and the proof of this one."""

    hands_over: Callable[[Case], Mapping[str, Any]] | None = None
    """Files that servers get instead of what was published."""
    plant: str = ""
    """Code that runs in the second server, once the adapter is loaded."""
    heal: str = ""
    is_in_slot: bool = False
    """The code changes the adapter's slot, which a first pass fills."""
    act: Callable[[Case], None] | None = None
    """Something that is done to the second server from outside."""
    is_part: bool = False
    """A small part of the effect: log-probs alone may say that the whole of it is there."""


def spoiled(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> Callable[[Case], Mapping[str, Any]]:
    """The spoiled tensors that a server reads."""

    def files(case: Case) -> Mapping[str, Any]:
        given = case.second.files
        file = ROTATIONS_FILE if ROTATIONS_FILE in given else MODEL_FILE
        return {**given, file: save(change(load(bytes(given[file]))))}

    return files


def of_no_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names in which SGLang finds no layer, so that it leaves them out. What stands before `layers.` it never reads."""
    return {name.replace(".layers.", ".h."): tensor for name, tensor in tensors.items()}


def other_layout(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One factor as it lies in memory transposed."""
    victim = next(name for name in sorted(tensors) if "lora_A" in name)
    return tensors | {victim: tensors[victim].T.reshape(tensors[victim].shape).contiguous()}


def doubled_alpha(case: Case) -> Mapping[str, Any]:
    config = json.loads(bytes(case.second.files[CONFIG_FILE]))
    config["lora_alpha"] *= 2
    return {**case.second.files, CONFIG_FILE: json.dumps(config).encode()}


def evict(case: Case) -> None:
    """The version that samples until now, and its files, from which SGLang would load it again."""
    case.bench.post("/unload_lora_adapter", {"lora_name": case.before})
    for file in case.bench.engine.slot(case.before).files().iterdir():
        file.unlink()


def load_the_older(case: Case) -> None:
    """Under the new name, on the second server only."""
    folder = case.bench.folder / f"{case.now}-is-{case.before}"
    folder.mkdir()
    for name, content in case.first.files.items():
        (folder / name).write_bytes(content)
    case.bench.post("/unload_lora_adapter", {"lora_name": case.now})
    case.bench.post("/load_lora_adapter", {"lora_name": case.now, "lora_path": str(folder)})


COMMON: Mapping[str, Fault] = {
    "tensor dropped": Fault(spoiled(drop_one), is_part=True),
    "tensor zeroed": Fault(spoiled(zero_one), is_part=True),
    "two tensors swapped": Fault(spoiled(swap_two), is_part=True),
    "stale version": Fault(lambda case: case.first.files),
    "slot never switched": Fault(plant=NEVER_SWITCHED, heal="del manager.prepare_lora_batch"),
    "adapter evicted": Fault(act=evict),
    "cache shared between versions": Fault(plant=ONE_CACHE, heal=OWN_CACHES),
    "one replica stale": Fault(act=load_the_older),
    "wrong base": Fault(plant=OTHER_BASE, heal=OTHER_BASE),
}
FAULTS: Mapping[str, Mapping[str, Fault]] = {
    "LoRA": {
        **COMMON,
        "wrong names": Fault(spoiled(of_no_layer)),
        "factor transposed": Fault(spoiled(other_layout), is_part=True),
        "scale doubled": Fault(doubled_alpha),
    },
    "OFT": {
        **COMMON,
        "wrong names": Fault(spoiled(lambda tensors: {f"model.{name}": t for name, t in tensors.items()})),
        "R transposed": Fault(
            plant=ROTATION + "table.copy_(table.transpose(-1, -2).clone())", is_in_slot=True, is_part=True
        ),
        "scale doubled": Fault(plant=ROTATION + "table.mul_(2)", is_in_slot=True, is_part=True),
    },
}


@dataclass
class Bench:
    """Servers of one kind, and the trainer that they are compared with."""

    kind: Literal["LoRA", "OFT"]
    adder: Adder
    engine: ServedEngine
    pids: Sequence[int]
    """Process ids of the servers, in the engine's order."""
    code: Path
    folder: Path
    canary_T: tuple[int, ...]
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))
    _trainer: TorchEngine | None = None

    @property
    def reads_back(self) -> bool:
        return self.engine.copies()[0].reads_back

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        """To the second server, behind the engine's back."""
        server = self.engine.replicas[-1].server
        answer = httpx.post(f"{server.url}{path}", json=body, headers=server.headers, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text

    def set_noise(self, mean: float, seed: int = 0) -> None:
        """Args: mean: of |noise|, in nat; 0 takes it away."""
        sigma = mean / (math.sqrt(2 / math.pi) * (0.9 + 0.1 * 4.0))
        for index, pid in enumerate(self.pids):
            run_inside(pid, self.code, NOISY.format(seed=2 * seed + index, sigma=sigma))

    def trainer_scores(self, adapter: AdapterFiles) -> tuple[Scored, Scored]:
        policy, tokenizer = self.adder
        if self._trainer is None:
            self._trainer = TorchEngine(policy, tokenizer, max_running_requests=4)
        name = f"trainer's {next(self._numbers)}"
        self._trainer.load_adapter(name, adapter)
        adapted, base = self._trainer.copies()[0].score(self.canary_T, [name, None])
        self._trainer.unload_adapter(name)
        return adapted, base

    def prove(
        self, name: str, adapter: AdapterFiles, previous: Sequence[Reading] | None
    ) -> tuple[list[Proof], list[Reading]]:
        """On every copy."""
        scores = self.trainer_scores(adapter)
        found = [
            prove(adapter, name, copy, scores, self.canary_T, limits=LIMITS, previous=previous and previous[index])
            for index, copy in enumerate(self.engine.copies())
        ]
        return [proof for proof, _ in found], [reading for _, reading in found]

    def try_fault(self, fault: Fault, scale: float) -> Outcome:
        """What proofs say of a publish with it, after one without: the least alarming of the copies that have it."""
        first, second = (random_adapter(self.adder[0], next(self._numbers), scale) for _ in range(2))
        number = next(self._numbers)
        case = Case(self, f"policy-v{number}", f"policy-v{number}-next", first, second)
        self.engine.load_adapter(case.before, first)
        healthy, readings = self.prove(case.before, first, None)
        assert not any(proof.failures for proof in healthy), healthy
        try:
            return self._publish_with(fault, case, readings)
        finally:
            for name in (case.now, case.before):
                if name in self.engine.adapters():
                    self.engine.unload_adapter(name)

    def _publish_with(self, fault: Fault, case: Case, readings: Sequence[Reading]) -> Outcome:
        files = fault.hands_over(case) if fault.hands_over else case.second.files
        try:
            self.engine.load_adapter(case.now, AdapterFiles(2, files, case.second.digest))
        except GateError:
            return "caught"
        words = {"{before}": case.before, "{now}": case.now}
        if fault.is_in_slot:
            assert self.engine.copies()[-1].adapter_digest(case.now) == case.second.digest
        if fault.plant:
            run_inside(self.pids[-1], self.code, filled(fault.plant, words))
        try:
            if fault.act:
                fault.act(case)
            proofs, _ = self.prove(case.now, case.second, readings)
        except GateError:
            return "caught"
        finally:
            if fault.heal:
                run_inside(self.pids[-1], self.code, fault.heal)
        outcomes = [outcome(proof) for proof in (proofs if fault.hands_over else proofs[-1:])]
        return max(outcomes, key=("caught", "unproven", "whole", "proven").index)

    def publish_healthy(self, publishes: int, mean: float) -> Counter[Outcome]:
        """One after the other: adapters that grow, stay and shrink, each proven against the one before."""
        self.set_noise(mean, seed=7)
        found: Counter[Outcome] = Counter()
        readings: Sequence[Reading] | None = None
        standing = None
        for index in range(publishes):
            adapter = random_adapter(self.adder[0], next(self._numbers), SCALES[index % len(SCALES)])
            name = f"policy-v{next(self._numbers)}"
            self.engine.load_adapter(name, adapter)
            proofs, readings = self.prove(name, adapter, readings)
            assert not any(proof.failures for proof in proofs), [proof.failures for proof in proofs]
            found.update(map(outcome, proofs))
            if standing:
                self.engine.unload_adapter(standing)
            standing = name
        if standing:
            self.engine.unload_adapter(standing)
        return found


def filled(code: str, words: Mapping[str, str]) -> str:
    for place, word in words.items():
        code = code.replace(place, word)
    return code


def outcome(proof: Proof) -> Outcome:
    return "caught" if proof.verdict == "failed" else proof.verdict


def is_allowed(found: Outcome, fault: Fault, *, reads_back: bool) -> bool:
    """Proven never; that the whole of an effect is there, where it is a part that is wrong and bytes cannot be seen."""
    return found in ("caught", "unproven") or (found == "whole" and fault.is_part and not reads_back)


def canary_of(adder: Adder, tokens: int) -> tuple[int, ...]:
    prompts = [f"{a}+{b}=" for a in range(11, 99, 11) for b in range(12, 99, 17)]
    tokenizer = adder[1]
    return build_canary([tuple(tokenizer.encode_chat([{"role": "user", "content": each}])) for each in prompts], tokens)


# --- the command ---


@contextmanager
def environment_of(code: Path) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in inside_environment(code)}
    os.environ.update(inside_environment(code))
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


@contextmanager
def attached_bench(folder: Path) -> Iterator[Bench]:
    """SGLang as its authors made it: slots cannot be read back."""
    adder, code = load_adder(LORA), folder / "code.py"
    with plain_servers(folder, 2, code=code, context=CONTEXT) as servers:
        engine = attach(adder, [url for url, _ in servers], folder, "Folder")
        try:
            pids = [server.pid for _, server in servers]
            yield Bench("LoRA", adder, engine, pids, code, folder, canary_of(adder, CANARY_TOKENS))
        finally:
            engine.close()


@contextmanager
def plugin_bench(folder: Path, kind: Literal["LoRA", "OFT"]) -> Iterator[Bench]:
    adder, code = load_adder(LORA if kind == "LoRA" else OFT), folder / "code.py"
    with environment_of(code):
        block_size = 0 if kind == "LoRA" else OFT.block_size
        for engine in start_server(adder, folder, oft_block_size=block_size, replicas=2, context=CONTEXT):
            pids = [server_of(engine, index).pid for index in range(2)]
            yield Bench(kind, adder, engine, pids, code, folder, canary_of(adder, CANARY_TOKENS))


BENCHES: Mapping[str, Callable[[Path], Any]] = {
    "attached": attached_bench,
    "plug-in": lambda folder: plugin_bench(folder, "LoRA"),
    "plug-in-OFT": lambda folder: plugin_bench(folder, "OFT"),
}


def run_bench(name: str, bench: Bench, healthy: int) -> list[str]:
    """What should not have been said."""
    wrong = []
    for mean in MEANS:
        bench.set_noise(mean)
        for fault_name, fault in FAULTS[bench.kind].items():
            found = [bench.try_fault(fault, scale) for scale in SCALES]
            print(f"{name:<12} {mean:<5} {fault_name:<30} {' '.join(f'{each:<9}' for each in found)}", flush=True)
            if not all(is_allowed(each, fault, reads_back=bench.reads_back) for each in found):
                wrong.append(f"{name}, noise {mean}: {fault_name}: {found}")
    for mean in MEANS:
        began = time.monotonic()
        told = bench.publish_healthy(healthy, mean)
        each = (time.monotonic() - began) / max(1, healthy)
        print(f"{name:<12} {mean:<5} {healthy} healthy publishes: {dict(told)}, {1000 * each:.0f} ms each", flush=True)
    return wrong


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    healthy = int(os.environ.get("HEALTHY", HEALTHY))
    wrong = []
    for name in names or BENCHES:
        with tempfile.TemporaryDirectory() as folder, BENCHES[name](Path(folder)) as bench:
            wrong += run_bench(name, bench, healthy)
    for each in wrong:
        print(f"WRONG {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
