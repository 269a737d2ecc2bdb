"""Twelve planted faults of a publish where the trainer is divided TP2·EP2, one rank stale, a wrong offset of experts.

    make test-rank-faults        all of them: either side, LoRA and OFT, matrices and experts

The ordinary tests run `sample()`. Ranks are real processes over gloo and the engine is torch's, in one process, so that
of its faults the layer and tensor are named; `tests/engines/test_tensor_parallel.py` has those of SGLang's ranks. A
fault is planted in one rank, between what is published and what is applied, or in its share of the base: the publish
must fail, and its one error must name rank, layer and tensor.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from orbit_runtime.adapters.layer import TRAINER_SLOT, Slot
from orbit_runtime.adapters.lora import LoRASlot
from orbit_runtime.adapters.oft import OFTSlot
from orbit_runtime.adapters.part import WHOLE
from orbit_runtime.adapters.state import config_json, slot_files
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.errors import GateError
from orbit_runtime.loop.fault_finder import FaultFinder
from orbit_runtime.loop.publish import BackgroundWriter, Publication, Publisher
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.parity.liveness import CHANGE_LIMITS
from orbit_runtime.policy import Policy, load_policy
from orbit_runtime.policy.snapshot import Snapshot, take_snapshot
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.storage import claim_execution, open_store
from orbit_runtime.training.megatron.groups import Groups, GroupSizes
from orbit_runtime.training.megatron.rank import RankSettings
from orbit_runtime.training.megatron.trainer import MegatronTrainer
from tests.fakes.faulty_engine import FaultyEngine, drop_one, swap_two, wrong_prefix, zero_one
from tests.integration.test_torch_trainer import SETTINGS
from tests.megatron.cases import folder_of
from tests.megatron.ranks import World, world
from tests.megatron.trainers import WorldRanks, rank_here
from tests.models.family_matrix import Case, adapter_of

DIVISION = GroupSizes(2, tensor=2, expert=2, sequence_parallel=True)
TOKENS = (5, 9, 3, 77, 20, 31, 64, 2, 11, 40)
CASES: Mapping[str, Case] = {
    "LoRA": Case("qwen3_moe", "INT4", "LoRA", "PerExpert"),
    "OFT": Case("qwen3_moe", "INT4", "OFT", "PerExpert"),
}
Where = Literal["matrix", "experts"]
VICTIMS: Mapping[Where, tuple[str, str]] = {
    "matrix": ("model.layers.1.self_attn.o_proj", "model.layers.0.self_attn.o_proj"),
    "experts": ("model.layers.1.mlp.experts.down_proj", "model.layers.0.mlp.experts.down_proj"),
}
"""The layer whose part is wrong in one rank, and one of the same shape."""
LIAR = 1
"""The rank that has the fault."""
RANK = rf"\brank {LIAR}: |\branks 0 and {LIAR} hold different values"
"""The rank in errors. If two ranks hold a tensor, nobody knows which is wrong: both are named."""


# --- what happens in the rank ---


def move(groups: Groups, seed: int, scale: float) -> None:
    """Every master, as an optimizer update of that size would, however the model is divided."""
    masters = rank_here().policy.injected.masters
    with torch.no_grad():
        for name, parameter in masters.parameters.items():
            place = masters.places[name]
            whole = torch.randn(place.shape, generator=torch.Generator().manual_seed(seed + sum(name.encode())))
            parameter.add_(place.cut(whole, masters.config) * scale)


def plant(groups: Groups, name: str, victim: str, other: str) -> None:
    if torch.distributed.get_rank() == LIAR:
        globals()[f"_{name}"](victim, other)


Change = Callable[[Slot, slice], Slot]
"""A slot of a layer, and of which of the rank's experts → another one."""


def _changed(slot: Slot, change: Callable[[torch.Tensor], torch.Tensor]) -> Slot:
    if isinstance(slot, LoRASlot):
        return replace(slot, lora_A=change(slot.lora_A), named=None)
    return replace(slot, rotation=change(slot.rotation), named=None)


def _applies(changes: Mapping[str, Change]) -> None:
    """From now on this rank's passes multiply by something else in these layers than its masters say."""
    built = rank_here().policy.injected.selection.applied_masters
    honest = built[TRAINER_SLOT]

    def build(layer: str | None = None, experts: slice = WHOLE, *newest: Any) -> dict[str, Slot]:
        slots = honest(layer, experts, *newest)
        return slots | {name: change(slots[name], experts) for name, change in changes.items() if name in slots}

    built[TRAINER_SLOT] = build


def _before(names: Iterable[str]) -> dict[str, Change]:
    """What these layers apply now."""
    honest = rank_here().policy.injected.selection.applied_masters[TRAINER_SLOT]
    with torch.no_grad():
        kept = {name: _changed(slot, lambda t: t.detach().clone()) for name, slot in honest().items()}

    def change(name: str) -> Change:
        return lambda slot, experts: _of_experts(kept[name], slot, experts)

    return {name: change(name) for name in names}


def _of_experts(whole: Slot, like: Slot, experts: slice) -> Slot:
    """The values of these experts. Args: like: a slot of theirs."""
    parts = {
        field: tensor if tensor.shape == of_some.shape else tensor[experts]
        for (field, tensor), of_some in zip(_fields(whole).items(), _fields(like).values(), strict=True)
    }
    return replace(whole, **parts, named=None)


def _fields(slot: Slot) -> dict[str, torch.Tensor]:
    return slot.tensors() if isinstance(slot, LoRASlot) else {"rotation": slot.rotation}


def _dropped(victim: str, other: str) -> None:
    layer = rank_here().policy.injected.layers[victim]
    selection, forward = layer.selection, layer.forward

    def bare(*given: Any) -> Any:
        before, selection.active = selection.active, None
        try:
            return forward(*given)
        finally:
            selection.active = before

    layer.forward = bare


def _zeroed(victim: str, other: str) -> None:
    _applies({victim: lambda slot, _: _changed(slot, torch.zeros_like)})


def _momentary(victim: str, other: str) -> None:
    """Only while the pass goes on: built again, it has the right values."""
    selection = rank_here().policy.injected.selection
    _applies({victim: lambda slot, _: slot if selection.trace is None else _changed(slot, torch.zeros_like)})


def _swapped(victim: str, other: str) -> None:
    honest = rank_here().policy.injected.selection.applied_masters[TRAINER_SLOT]
    _applies({victim: lambda _, experts: replace(honest(other, experts)[other], named=None)})


def _transposed(victim: str, other: str) -> None:
    def turned(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(-1, -2).reshape(t.shape).contiguous()

    _applies({victim: lambda slot, _: _changed(slot, turned)})


def _scaled(victim: str, other: str) -> None:
    def twice(slot: Slot) -> Slot:
        if isinstance(slot, OFTSlot):
            return _changed(slot, lambda R: 2 * R)
        return replace(slot, scaling=2 * slot.scaling, named=None)

    _applies({victim: lambda slot, _: twice(slot)})


def _stale(victim: str, other: str) -> None:
    """One tensor of the version before."""
    _applies(_before([victim]))


def _rank_stale(victim: str, other: str) -> None:
    """Everything that only this rank holds, of the version before."""
    made = rank_here()
    places = made._outline
    kinds = {name: [key for key in places if key.startswith(f"{name}.")] for name in made.policy.injected.layers}
    own = {name for name, keys in kinds.items() if not any(places[key].place.is_whole for key in keys)}
    _applies(_before(own or {victim}))


def _copy_stale(victim: str, other: str) -> None:
    """Makes a factor that both ranks hold whole stale."""
    made = rank_here()
    name = next(key for key, held in made._outline.items() if held.place.is_whole).rpartition(".")[0]
    _applies(_before([name]))


def _never_switched(victim: str, other: str) -> None:
    """Its passes go on without an adapter."""
    selection = rank_here().policy.injected.selection
    honest = selection.use
    selection.use = lambda segments, **how: honest(None, **how)


def _evicted(victim: str, other: str) -> None:
    """Between a publish and its proof, what the rank held of one layer."""
    made = rank_here()
    honest = made.score

    def score(tokens: Sequence[int]) -> Any:
        with torch.no_grad():
            for name, parameter in made._masters.parameters.items():
                if name.startswith(f"{victim}."):
                    parameter.zero_()
        return honest(tokens)

    made.score = score


def _cached(victim: str, other: str) -> None:
    """It publishes what it read for the version before."""
    made = rank_here()
    made.prepare_publish()
    kinds = [key for key in made._outline if key.startswith(f"{victim}.")]
    what = "lora" if made._masters.config.type == "LoRA" else "rotations"
    held = made._holdings["policy"]
    kept = {key: held.value(what, key, None).clone() for key in kinds}
    honest = held.value

    def value(asked: str, key: str, row: int | None) -> torch.Tensor | None:
        if asked != what or key not in kept:
            return honest(asked, key, row)
        return kept[key] if row is None else kept[key][row]

    held.value = value


def _misnamed(victim: str, other: str) -> None:
    """It gives two layers' tensors under each other's names."""
    held = rank_here()._holdings["policy"]
    honest = held.value

    def value(what: str, key: str, row: int | None) -> torch.Tensor | None:
        layer, _, kind = key.rpartition(".")
        names = {victim: other, other: victim}
        return honest(what, f"{names.get(layer, layer)}.{kind}" if what in ("lora", "rotations") else key, row)

    held.value = value


def _base(victim: str, other: str) -> None:
    """Its shard of one matrix holds another's values."""
    layers = rank_here().policy.injected.layers
    for name, buffer in layers[victim].base.named_buffers():
        buffer.copy_(dict(layers[other].base.named_buffers())[name])


def _offset(victim: str, other: str) -> None:
    """Its experts are those of the other rank, it believes."""
    experts = rank_here().policy.model.model.layers[1].mlp.experts
    count = len(experts.held)
    experts.held = range(experts.held.start - count, experts.held.stop - count)


# --- faults ---


@dataclass(frozen=True)
class Fault:
    """What is planted, and what the error must say; `{victim}` is the layer, `{leaf}` the end of its name."""

    plant: str
    says: tuple[str, ...] = ("{victim}.",)
    ranks: str = RANK
    """How it names the rank, as a regular expression."""
    both: bool = True
    """For matrices and experts alike."""


TRAINERS: Mapping[str, Fault] = {
    "tensor dropped": Fault("dropped", ("{victim}.", "was not applied")),
    "tensor zeroed": Fault("zeroed"),
    "two tensors swapped": Fault("swapped"),
    "stale version": Fault("stale"),
    "slot never switched": Fault("never_switched", ("model.layers.0.", "was not applied"), both=False),
    "adapter evicted": Fault("evicted"),
    "cache shared between versions": Fault("cached", ("{victim}.", "has other values")),
    "one copy stale": Fault("copy_stale", ("model.layers.0.",), both=False),
    "wrong base": Fault("base", ("base tensor model.layers.1.", "{leaf}.weight"), f"; rank {LIAR} of the trainer"),
    # The layer below is named first, which got this one's tensors.
    "wrong names": Fault("misnamed", ("{other}.",)),
    "factor transposed": Fault("transposed"),
    "scale doubled": Fault("scaled"),
    "one rank stale": Fault("rank_stale", ("model.layers.",), both=False),
    "offset of experts": Fault("offset", ("model.layers.1.mlp.experts.",), f"{LIAR} of the trainer hold", both=False),
    "values of one moment": Fault("momentary", ("{victim}.", "was applied with other values than")),
}
ENGINES: Mapping[str, Callable[[FaultyEngine], None]] = {
    "tensor dropped": lambda engine: _spoil(engine, drop_one),
    "tensor zeroed": lambda engine: _spoil(engine, zero_one),
    "two tensors swapped": lambda engine: _spoil(engine, swap_two, strict=True),
    "wrong names": lambda engine: _spoil(engine, wrong_prefix),
    "stale version": lambda engine: setattr(engine, "stale", True),
    "slot never switched": lambda engine: setattr(engine, "never_switches", True),
}


def _spoil(engine: FaultyEngine, change: Callable[..., Any], *, strict: bool = False) -> None:
    engine.spoil, engine.strict = change, strict


class TappedEngine(FaultyEngine):
    """An engine whose layers can be inspected, like a server's."""

    is_tapped = True

    def __init__(self, engine: TorchEngine, policy: Policy) -> None:
        super().__init__(engine, policy.injected.layers)
        self._policy = policy
        self._settings = config_json(policy.injected.config, SETTINGS.base_model)

    def snapshot(self, token_ids_T: Sequence[int], adapter: str | None) -> Snapshot:
        name = self._name(adapter)
        files = {} if name is None else slot_files(self.layers, name, self._settings)
        return take_snapshot(self._policy, token_ids_T, name, files)


@dataclass
class Bench:
    """Ranks, and the policy that a torch engine samples with, of one checkpoint."""

    ranks: World
    case: Case
    folder: Path
    policy: Policy

    def fail(self, spoil: Callable[[TappedEngine], None]) -> str:
        """What the third publish of a new trainer says, with the fault planted behind the second; empty: it is proven.

        Args:
            spoil: plants the fault.
        """
        settings = RankSettings(self.folder, adapter_of(self.case), self.ranks.sizes, SETTINGS)
        trainer = MegatronTrainer(WorldRanks(self.ranks, settings), SETTINGS.base_model)
        tokenizer = ChatTokenizer(builtin_folder("tiny-adder", "INT4"))
        engine = TappedEngine(TorchEngine(self.policy, tokenizer, max_running_requests=4), self.policy)
        bisect = FaultFinder(engine, TOKENS, "float32", trainer.snapshot, trainer.explain)
        with tempfile.TemporaryDirectory() as root:
            store = open_store(root)
            execution, keeper = claim_execution(store, run_name="planted"), BackgroundWriter()
            limit = CHANGE_LIMITS["float32"]
            publisher = Publisher(
                store, execution, keeper, engine, trainer, TOKENS, limit, "tree:0", bisect, base_limit=0.02
            )
            stands: Publication | None = None
            try:
                for version in range(3):
                    if version == 2:
                        spoil(engine)
                    if version:
                        self.ranks.call(move, version, 0.05)
                    stands = publisher.publish(version, stands)
                    keeper.wait()
            except GateError as error:
                return str(error) if version == 2 else f"failed before the fault: {error}"
            finally:
                keeper.close()
                for name in engine.engine.adapters():
                    engine.engine.unload_adapter(name)
        return ""

    def try_trainers(self, fault: Fault, where: Where) -> str:
        """What is wrong with the error; empty: it names all that it should."""
        victim, other = VICTIMS[where]
        said = self.fail(lambda _: self.ranks.call(plant, fault.plant, victim, other) and None)
        words = [each.format(victim=victim, other=other, leaf=victim.rpartition(".")[2]) for each in fault.says]
        missing = [each for each in words if each not in said]
        missing += [] if re.search(fault.ranks, said) else [fault.ranks]
        return f"{missing} is not in: {said or '(proven)'}" if missing else ""

    def try_engines(self, name: str) -> str:
        said = self.fail(lambda engine: ENGINES[name](engine))
        return "" if "model.layers." in said else said or "(proven)"


@contextmanager
def bench(kind: str, root: Path) -> Iterator[Bench]:
    case = CASES[kind]
    with world(DIVISION) as ranks:
        folder = folder_of(root, case)
        yield Bench(ranks, case, folder, load_policy(folder, adapter_of(case)))


def all_faults() -> list[tuple[str, str, Where]]:
    """(side, name, where)."""
    wheres: tuple[Where, ...] = ("matrix", "experts")
    found = [
        ("trainer", name, where)
        for name, fault in TRAINERS.items()
        for where in wheres
        if fault.both or where == "matrix"
    ]
    return [*found, *(("engine", name, "matrix") for name in ENGINES)]  # type: ignore[list-item]


def sample(kind: str) -> list[tuple[str, str, Where]]:
    """Each fault of the trainer once, alternating between adapters and between matrices and experts."""
    found = []
    for number, (name, fault) in enumerate(TRAINERS.items()):
        if number % 2 == list(CASES).index(kind):
            found.append(("trainer", name, "experts" if fault.both and number % 4 > 1 else "matrix"))
    return found  # type: ignore[return-value]


def try_one(bench: Bench, side: str, name: str, where: Where) -> str:
    if side == "engine":
        return bench.try_engines(name)
    return bench.try_trainers(TRAINERS[name], where)


def main(kinds: Sequence[str]) -> int:
    torch.set_num_threads(1)
    wrong = 0
    for kind in kinds or CASES:
        with tempfile.TemporaryDirectory() as root, bench(kind, Path(root)) as made:
            for side, name, where in all_faults():
                began = time.monotonic()
                said = try_one(made, side, name, where)
                seconds = time.monotonic() - began
                print(f"{kind:<5} {side:<8} {name:<30} {where:<8} {seconds:5.1f} s  {said or 'named'}", flush=True)
                wrong += bool(said)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
