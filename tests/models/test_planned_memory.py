"""The planner's bytes against what trainer and engine really allocate, part by part, on tiny models on the CPU.

The measuring side looks at tensors' storages: those that the parts hold, those that autograd saves, and those that
appear while a pass runs. It knows nothing of the planner's formulas.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from orbit_runtime.adapters.buffer import publishable
from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.adapters.layer import TRAINER_SLOT
from orbit_runtime.data.chat import ChatTokenizer
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.checkpoint import folder_facts
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner import Machine, Plan, plan
from orbit_runtime.planner import assumptions as known
from orbit_runtime.policy import Policy, load_policy, native
from orbit_runtime.policy.load import widen
from orbit_runtime.policy.logprobs import CHUNK_ELEMENTS
from orbit_runtime.policy.packed import Branch, PackedBatch
from orbit_runtime.quant.linear import DENSE_BYTES_LIMIT, FrozenLinear
from orbit_runtime.rollout import TorchEngine
from orbit_runtime.rollout.cache import KVCache
from orbit_runtime.rollout.decoding import PREFILL_TOKENS
from orbit_runtime.rollout.requests import sample
from orbit_runtime.spec import OrbitRun
from orbit_runtime.training import TorchTrainer
from orbit_runtime.types import Request, Sample, Sampling
from tests.integration.test_torch_trainer import SETTINGS, changed, num_parameters
from tests.integration.tiny_models import TARGETS, make_checkpoint

PROMPT, NEW, RUNNING = 12, 20, 8
"""Every sequence is as long as the manifest allows, so that the plan's upper bounds are what happens."""
SHIPPED = ("int4", "bf16", "fp8", "nvfp4", "mxfp4")
CASES = [
    ("int4", "LoRA"), ("int4", "OFT"), ("bf16", "LoRA"), ("fp8", "LoRA"), ("nvfp4", "OFT"), ("mxfp4", "LoRA"),
    ("llama", "LoRA"), ("qwen3", "OFT"),
]  # fmt: skip
FIGURES: dict[str, dict[str, tuple[int, int]]] = {}
"""Case → part → (measured, planned) of the tests that ran; `benchmarks/planned_memory.py` makes a table of them."""


@dataclass(frozen=True)
class Case:
    name: str
    adapter: Literal["LoRA", "OFT"]
    facts: ModelFacts
    made: Plan
    policy: Policy
    trainer: TorchTrainer
    tokenizer: ChatTokenizer


def manifest_for(adapter: str, recompute: str = "Auto") -> OrbitRun:
    settings = {"lora": {"rank": 8, "alpha": 16.0}} if adapter == "LoRA" else {"oft": {"blockSize": 16}}
    return OrbitRun.model_validate({
        "apiVersion": "orbitrl.dev/v1alpha1", "kind": "OrbitRun", "metadata": {"name": "measured"},
        "spec": {
            "model": {"uri": "model", "maxSequenceLength": PROMPT + NEW},
            "adapter": {"type": adapter, **settings},
            "algorithm": {"groupSize": 4},
            "data": {"prompts": [{"uri": "prompts.jsonl"}]},
            "environment": {"rewards": [{"name": "r", "type": "ExactMatch"}]},
            "rollout": {"maxRunningRequests": RUNNING, "sampling": {"maxNewTokens": NEW}},
            "training": {"steps": 1, "promptsPerStep": 4, "microBatchTokens": 256, "recompute": recompute},
        },
    })  # fmt: skip


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}", scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind, adapter = request.param
    if kind in SHIPPED:
        folder = builtin_folder("tiny-adder", kind.upper())
    else:
        folder = make_checkpoint(tmp_path_factory.mktemp(kind), kind)
    facts = folder_facts(folder)
    made = plan(manifest_for(adapter), facts, Machine(None, 0, 2**34))
    config = AdapterConfig(type=adapter, targets=TARGETS, rank=8, alpha=16.0, block_size=16)
    policy = load_policy(folder, config)
    return Case(
        f"{kind}, {adapter}",
        adapter,
        facts,
        made,
        policy,
        TorchTrainer(policy, changed(SETTINGS, micro_batch_tokens=256)),
        ChatTokenizer(folder),
    )


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Each storage once, whole."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def samples() -> list[Sample]:
    """Eight sequences that share nothing: 256 tokens of a micro-batch."""
    length = PROMPT + NEW
    made = []
    for index in range(RUNNING):
        tokens = tuple(2 + (7 * index + 3 * at) % 100 for at in range(length))
        mask = (0,) * PROMPT + (1,) * NEW
        columns = {"sampled": [-1.0] * length, "advantage": [0.5 - index % 2] * length}
        made.append(Sample(tokens, mask, columns, index, PROMPT))
    return made


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans count what torch's fused kernel keeps. Orbit's own for CPUs keeps less."""
    monkeypatch.setattr(native, "can_attend", lambda _: False)


def within(case: Case, part: str, measured: int, planned: int, share: float = 0.05) -> None:
    FIGURES.setdefault(case.name, {})[part] = (measured, planned)
    assert planned == pytest.approx(measured, rel=share), f"planned {planned}, measured {measured}"


def test_the_packed_base(case: Case) -> None:
    # Tables of rotary angles are computed, not loaded, and no part of the plan.
    angles = {id(buffer) for name, buffer in case.policy.model.named_buffers() if "inv_freq" in name}
    base = [t for t in case.policy._base_tensors().values() if id(t) not in angles]
    within(case, "base", storage_bytes(base), case.made.phases["train"]["base"])


def held_by(policy: Policy) -> list[torch.Tensor]:
    """The base, and what its linears multiply by."""
    linears = (module for module in policy.model.modules() if isinstance(module, FrozenLinear))
    return [*policy._base_tensors().values(), *(view for linear in linears for view in linear.views())]


@pytest.mark.parametrize("kind", ["bf16", "int4", "nvfp4", "qwen3"])
def test_linears_that_are_widened(kind: str, tmp_path: Path) -> None:
    folder = builtin_folder("tiny-adder", kind.upper()) if kind in SHIPPED else make_checkpoint(tmp_path, kind)
    made = plan(manifest_for("LoRA"), folder_facts(folder), Machine(None, 0, 2**34))
    config = AdapterConfig(type="LoRA", targets=TARGETS, rank=8, alpha=16.0)
    policy = load_policy(folder, config)
    before = storage_bytes(held_by(policy))
    more = storage_bytes(held_by(widen(policy))) - before
    within(Case(kind, "LoRA", *[None] * 5), "base, widened", more, made.phases["train"]["base, widened"])


def test_the_adapter_its_gradients_and_the_optimizer(case: Case) -> None:
    masters = list(case.policy.injected.masters.parameters.values())
    seen: dict[str, int] = {}
    optimizer = case.trainer._updater.optimizer
    optimizer.register_step_pre_hook(
        lambda *_: seen.update(gradients=storage_bytes(m.grad for m in masters if m.grad is not None))
    )
    case.trainer.update(samples())
    moments = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    train = case.made.phases["train"]
    within(case, "adapter", storage_bytes(masters), train["adapter"])
    within(case, "optimizer", storage_bytes(moments), train["optimizer"])
    within(case, "gradients", seen["gradients"], train["gradients"])
    assert case.made.adapter.total == num_parameters(case.trainer)


def test_the_adapter_as_a_pass_applies_it(case: Case) -> None:
    masters = {master.untyped_storage().data_ptr() for master in case.policy.injected.masters.parameters.values()}
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        applied = case.policy.injected.masters.applied(torch.float32)
    kept += [tensor for slot in applied.values() for tensor in slot.tensors().values()]
    own = [tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in masters]
    within(case, "adapter, rounded", storage_bytes(own), case.made.phases["train"]["adapter, rounded"])


def test_the_engines_slots(case: Case) -> None:
    engine = TorchEngine(case.policy, case.tokenizer, max_running_requests=RUNNING)
    for version in range(known.ADAPTER_VERSIONS):
        engine.load_adapter(f"policy-v{version}", publishable(case.trainer, version))
    slots = [slot for layer in case.policy.injected.layers.values() for slot in layer.slots.values()]
    tensors = [tensor for slot in slots for tensor in slot.tensors().values()]
    tensors += [slot.parameters for slot in slots if getattr(slot, "parameters", None) is not None]
    within(case, "adapter slots", storage_bytes(tensors), case.made.phases["publish"]["adapter slots"])
    engine.close()


def test_the_kv_cache(case: Case) -> None:
    # Another test's may not be collected yet.
    older = {id(each) for each in gc.get_objects() if type(each) is KVCache}
    engine = TorchEngine(case.policy, case.tokenizer, max_running_requests=RUNNING)
    prompts = [tuple(2 + (5 * n + at) % 100 for at in range(PROMPT)) for n in range(RUNNING)]
    requests = [Request(n, n, prompt, Sampling(1.0, 1.0, NEW), None) for n, prompt in enumerate(prompts)]
    running = sample(engine, requests)
    next(running)
    found = [each for each in gc.get_objects() if type(each) is KVCache and each._block is not None]
    (cache,) = [each for each in found if id(each) not in older]
    assert cache._block is not None
    within(case, "KV cache", cache._block.nbytes, case.made.phases["rollout"]["KV cache"])
    running.close()
    engine.close()


def kept_by(policy: Policy, batch: PackedBatch) -> int:
    """Bytes that a pass over the batch saves for its backward, without the base and the adapter."""
    saved: list[torch.Tensor] = []
    with policy.injected.selection.use(TRAINER_SLOT):
        applied = [t for slot in policy.injected.selection.live[TRAINER_SLOT].values() for t in slot.tensors().values()]
        known_storages = {t.untyped_storage().data_ptr() for t in (*policy._base_tensors().values(), *applied)}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in known_storages:
                saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy.logprobs(batch)
    return storage_bytes(saved)


def test_what_a_backward_waits_for(case: Case) -> None:
    batch = case.policy.pack(
        [Branch(i, s.token_ids_T[:PROMPT], s.token_ids_T[PROMPT:]) for i, s in enumerate(samples())]
    )
    # As on a GPU: through the model's own layers.
    measured = kept_by(replace(case.policy, direct=None), batch)
    within(case, "activations", measured, case.made.phases["train"]["activations"])
    assert kept_by(case.policy, batch) <= case.made.phases["train"]["activations"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [40, 200])
@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "modules"])
def test_the_kernel_of_a_cpu_keeps_no_more_than_the_fused_one(
    length: int, is_direct: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = AdapterConfig("LoRA", TARGETS, rank=8)
    policy = load_policy(builtin_folder("tiny-adder", "INT4"), adapter, compute_dtype=dtype)
    policy = policy if is_direct else replace(policy, direct=None)
    tokens = [5 + number % 20 for number in range(length)]
    batch = policy.pack([Branch(row, tokens[: length // 2], tokens[length // 2 :]) for row in range(4)])
    fused = kept_by(policy, batch)
    monkeypatch.undo()
    assert kept_by(policy, batch) <= fused


@pytest.mark.parametrize("recompute", ["Selective", "PerLayer"])
def test_what_is_kept_for_layers_that_are_computed_again(
    case: Case, recompute: Literal["Selective", "PerLayer"]
) -> None:
    """Tensors that autograd saves outside of layers, and those that Python holds for their second pass."""
    run = manifest_for(case.adapter, recompute=recompute)
    planned = plan(run, case.facts, Machine(None, 0, 2**34)).phases["train"]
    batch = packed_samples(case.policy)
    with torch.no_grad():
        # What is made at the first pass and stays is no activation.
        case.policy.logprobs(batch)
    before = {id(tensor) for tensor in living_tensors()}
    saved: list[torch.Tensor] = []
    with case.policy.injected.selection.use(TRAINER_SLOT):
        before |= {id(tensor) for tensor in living_tensors()}
        case.policy.recompute(recompute)
        with (
            angles(case.policy) as known,
            torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        ):
            logprobs, _ = case.policy.logprobs(batch)
    known |= {t.untyped_storage().data_ptr() for t in living_tensors() if id(t) in before}
    held = [t for t in (*saved, *living_tensors()) if t.untyped_storage().data_ptr() not in known]
    case.policy.recompute("None")
    # The result itself is no activation: two numbers for each target.
    within(case, f"activations, {recompute}", storage_bytes(held) - 2 * logprobs.nbytes, planned["activations"])


def test_what_a_layer_holds_while_it_is_computed_again(case: Case) -> None:
    """What autograd saves within each layer's call, of the widest."""
    run = manifest_for(case.adapter, recompute="PerLayer")
    planned = plan(run, case.facts, Machine(None, 0, 2**34)).phases["train"]
    batch = packed_samples(case.policy)
    saved: dict[int, list[torch.Tensor]] = {}
    layers = case.policy.model.model.layers
    now: list[int] = []
    hooks = [
        hook
        for number, layer in enumerate(layers)
        for hook in (
            layer.register_forward_pre_hook(lambda *_, number=number: now.append(number)),
            layer.register_forward_hook(lambda *_: now.clear()),
        )
    ]
    with case.policy.injected.selection.use(TRAINER_SLOT), angles(case.policy) as known:
        known |= {t.untyped_storage().data_ptr() for t in living_tensors()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if now and tensor.untyped_storage().data_ptr() not in known:
                saved.setdefault(now[0], []).append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            # As where layers are computed again: through the model's own.
            replace(case.policy, direct=None).logprobs(batch)
    for hook in hooks:
        hook.remove()
    assert len(saved) == len(layers)
    within(case, "layer recomputed", max(map(storage_bytes, saved.values())), planned["layer recomputed"])


@contextmanager
def angles(policy: Policy) -> Iterator[set[int]]:
    """Storages of the rotary embedding's sines and cosines, made once for all layers: no part of the plan."""
    made: set[int] = set()
    rotary = policy.model.model.rotary_emb
    hook = rotary.register_forward_hook(lambda *each: made.update(t.untyped_storage().data_ptr() for t in each[2]))
    try:
        yield made
    finally:
        hook.remove()


def packed_samples(policy: Policy) -> PackedBatch:
    return policy.pack([Branch(i, s.token_ids_T[:PROMPT], s.token_ids_T[PROMPT:]) for i, s in enumerate(samples())])


def living_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]


def test_the_constants_of_our_own_loops_are_the_planners() -> None:
    assert known.DENSE_BYTES == DENSE_BYTES_LIMIT
    assert known.LOGIT_ELEMENTS == CHUNK_ELEMENTS
    assert known.PREFILL_TOKENS == PREFILL_TOKENS
