"""Real SGLang servers of two processes, each with half of every matrix: what is published is proven of both together.

On a CPU the processes talk by gloo. Servers on several GPUs were not run on hardware.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from orbit_runtime.adapters.config import AdapterConfig
from orbit_runtime.errors import GateError
from orbit_runtime.parity.liveness import Limits, Proof, prove
from orbit_runtime.policy.snapshot import take_snapshot
from orbit_runtime.rollout.requests import sample
from orbit_runtime.rollout.served_engine import ServedEngine
from orbit_runtime.rollout.transport import Transport, shared_memory
from orbit_runtime.types import AdapterFiles, Request, Sampling
from tests.engines.servers import OFT, Adder, attach, server_of, start_server
from tests.engines.test_contract import policy_logprobs
from tests.engines.test_families import LORA_EXPERTS, OFT_EXPERTS, PROMPTS, check_samples, proven, serve
from tests.engines.test_sglang_faults import canary, policy_scores
from tests.engines.test_sglang_layers import compare
from tests.engines.test_transports import Chosen, folders_told
from tests.integration.engine_inputs import by_id, random_adapter, requests_for

NewName = Callable[[], str]
OnRank = Callable[[ServedEngine, int, str], None]
SLOT = (
    "slot = next(manager.memory_pool.uid_to_buffer_id[key] for key, each in manager.lora_refs.items()"
    " if each.lora_name == {name!r})\n"
)
TRANSPOSED = "R = manager.rotations.layers[{layer}].buffer[slot]\nR.copy_(R.transpose(-1, -2).clone())"


@pytest.fixture(scope="module")
def chosen() -> Chosen:
    return Chosen()


@pytest.fixture(scope="module")
def halves(
    oft_adder: Adder, inside: Path, chosen: Chosen, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedEngine]:
    """It serves LoRA as well."""
    folder = tmp_path_factory.mktemp("halves")
    yield from start_server(oft_adder, folder, oft_block_size=OFT.block_size, transport=chosen, tensor_parallel=2)


@pytest.fixture
def engine(halves: ServedEngine, chosen: Chosen) -> Iterator[ServedEngine]:
    yield halves
    for name in halves.adapters():
        halves.unload_adapter(name)
    chosen.now = None


@pytest.fixture(params=["LoRA", "OFT"])
def adder(request: pytest.FixtureRequest) -> Adder:
    found: Adder = request.getfixturevalue("oft_adder" if request.param == "OFT" else "lora_adder")
    return found


@pytest.fixture
def on_rank(run_inside: Callable[..., None], tmp_path: Path) -> OnRank:
    """Runs code in one of the server's processes, with its LoRAManager as `manager`."""

    def run(engine: ServedEngine, rank: int, code: str) -> None:
        done = tmp_path / f"done-{time.monotonic_ns()}"
        lines = [*code.splitlines(), f"open({str(done)!r}, 'w').close()"]
        body = "\n".join(f"    {line}" for line in lines)
        run_inside(engine, f"if manager.memory_pool.tp_rank == {rank}:\n{body}\n")
        until = time.monotonic() + 30
        while not done.exists():
            assert time.monotonic() < until, f"rank {rank} did not run the code"
            time.sleep(0.05)

    return run


def proof_of(engine: ServedEngine, adder: Adder, name: str, adapter: AdapterFiles) -> Proof:
    policy, tokenizer = adder
    (copy,) = engine.copies()
    scores = policy_scores(policy, adapter, canary(tokenizer))
    return prove(adapter, name, copy, scores, canary(tokenizer), limits=Limits(1e-3, 0.02), previous=None)[0]


def failures_again(proof: Proof) -> list[str]:
    """Failures of a version that was proven before: the canary is in its cache, as it should be."""
    return [each for each in proof.failures if not each.startswith("versions share cached keys")]


@pytest.mark.parametrize("transport", [None, shared_memory])
def test_a_publish_reaches_both_processes_and_is_proven_of_them_together(
    engine: ServedEngine,
    chosen: Chosen,
    adder: Adder,
    new_name: NewName,
    transport: Transport | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what each process tells of the canary's pass: none is asked about its slots, for which all would stop."""
    chosen.now = transport
    for version in (1, 2):
        name, adapter = new_name(), random_adapter(adder[0], version)
        engine.load_adapter(name, adapter)
        assert folders_told(engine, name) == ["ticket" if transport else name]
        with monkeypatch.context() as nobody_asks:
            nobody_asks.setattr(engine.replicas[0], "facts", None)
            proof = proof_of(engine, adder, name, adapter)
        assert proof.failures == ()
        assert proof.slot_digest == adapter.digest
    about = engine.replicas[0].about
    assert about is not None
    assert (about.ranks, engine.replicas[0].missed) == (2, 0)


def test_samples_have_the_policys_log_probs_with_lora_oft_and_none_in_one_batch(
    engine: ServedEngine, lora_adder: Adder, oft_adder: Adder, new_name: NewName
) -> None:
    policies = {new_name(): lora_adder[0], new_name(): oft_adder[0]}
    adapters = {name: random_adapter(policy, 3) for name, policy in policies.items()}
    for name, adapter in adapters.items():
        engine.load_adapter(name, adapter)
    sampling, requests = Sampling(max_new_tokens=6), []
    for name in (None, *adapters):
        for made in requests_for(oft_adder[1], ["12+34=", "56+78=", "90+11="], 4, sampling=sampling, adapter=name):
            requests.append(Request(len(requests), made.key + len(requests), made.prompt_ids_T, sampling, name))
    found = by_id(list(sample(engine, requests)))
    assert sorted(found) == [request.request_id for request in requests]
    for request in requests:
        answer, policy = found[request.request_id], policies.get(request.adapter or "", lora_adder[0])
        with_adapter = adapters[request.adapter] if request.adapter else None
        expected = policy_logprobs(policy, with_adapter, request.prompt_ids_T, answer.token_ids_T)
        torch.testing.assert_close(torch.tensor(answer.logprobs_T), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("kind", "fault", "says"),
    [
        ("LoRA", "modules['self_attn.o_proj'].A_buffer[slot].mul_(2)", "layers.0.self_attn.o_proj.lora_A"),
        ("LoRA", "modules['mlp.gate_up_proj'].B_buffer[slot, -1].mul_(2)", "layers.0.mlp.up_proj.lora_B"),
        ("LoRA", "modules['self_attn.qkv_proj'].A_buffer_qkv[slot].mul_(2)", "layers.0.self_attn.k_proj.lora_A"),
        ("LoRA", "modules['mlp.down_proj'].B_buffer[slot].mul_(2)", "layers.0.mlp.down_proj.lora_B"),
        ("OFT", TRANSPOSED.format(layer="'model.layers.0.mlp.down_proj'"),
         "layers.0.mlp.down_proj.oft_R is transposed"),
    ],
)  # fmt: skip
def test_what_one_process_holds_otherwise_is_named_with_its_number(
    engine: ServedEngine, lora_adder: Adder, oft_adder: Adder, new_name: NewName, on_rank: OnRank,
    kind: str, fault: str, says: str,
) -> None:  # fmt: skip
    adder = oft_adder if kind == "OFT" else lora_adder
    name, adapter = new_name(), random_adapter(adder[0], 4)
    engine.load_adapter(name, adapter)
    assert proof_of(engine, adder, name, adapter).failures == ()
    modules = (
        "modules = {name.removeprefix('model.layers.0.'): each for name, each in manager.lora_modules[0].items()}\n"
    )
    on_rank(engine, 1, SLOT.format(name=name) + modules + fault)
    proof = proof_of(engine, adder, name, adapter)
    assert proof.slot_digest != adapter.digest
    told = " ".join(proof.failures)
    assert f"rank 1: model.{says}" in told
    assert "rank 0" not in told


@pytest.mark.parametrize("stale", [0, 1])
def test_a_process_that_still_applies_the_version_before_is_named(
    engine: ServedEngine, adder: Adder, new_name: NewName, on_rank: OnRank, stale: int
) -> None:
    old, new = new_name(), new_name()
    adapters = {old: random_adapter(adder[0], 5), new: random_adapter(adder[0], 6)}
    for name, adapter in adapters.items():
        engine.load_adapter(name, adapter)
        assert proof_of(engine, adder, name, adapter).failures == ()
    copy_over = (
        SLOT.format(name=old) + "before = slot\n" + SLOT.format(name=new) + "pool = manager.memory_pool\n"
        "for buffers in (pool.A_buffer, pool.B_buffer):\n"
        "    for layers in buffers.values():\n"
        "        for each in layers:\n"
        "            each[slot].copy_(each[before])\n"
        "for each in manager.rotations.layers.values():\n"
        "    each.buffer[slot].copy_(each.buffer[before])\n"
    )
    on_rank(engine, stale, copy_over)
    told = " ".join(proof_of(engine, adder, new, adapters[new]).failures)
    assert f"rank {stale}: model.layers.0" in told
    assert f"rank {1 - stale}" not in told
    assert failures_again(proof_of(engine, adder, old, adapters[old])) == []


MISSES = (
    "from orbit_runtime.sglang_plugin import adapter_loading\n"
    "from orbit_runtime.adapters.ticket import NotArrivedError\n"
    "adapter_loading.right = adapter_loading.from_memory\n"
    "def misses(ticket):\n"
    "    adapter_loading.from_memory = adapter_loading.right\n"
    "    raise {error}\n"
    "adapter_loading.from_memory = misses\n"
)


def test_an_adapter_that_did_not_reach_one_process_comes_to_all_as_files(
    engine: ServedEngine, chosen: Chosen, adder: Adder, new_name: NewName, on_rank: OnRank
) -> None:
    chosen.now = shared_memory
    missed = engine.replicas[0].missed
    on_rank(engine, 1, MISSES.format(error="NotArrivedError('it was not looked for')"))
    name, adapter = new_name(), random_adapter(adder[0], 7)
    engine.load_adapter(name, adapter)
    assert engine.replicas[0].missed == missed + 1
    assert folders_told(engine, name) == [name]
    assert proof_of(engine, adder, name, adapter).failures == ()
    assert engine.replicas[0].restarts == 0


def test_a_load_that_one_process_refuses_stands_in_none_and_the_server_goes_on(
    engine: ServedEngine, chosen: Chosen, lora_adder: Adder, new_name: NewName, on_rank: OnRank
) -> None:
    chosen.now = shared_memory
    on_rank(engine, 1, MISSES.format(error="ValueError('this one is not for me')"))
    name, adapter = new_name(), random_adapter(lora_adder[0], 8)
    with pytest.raises(GateError, match="rank 1: this one is not for me"):
        engine.load_adapter(name, adapter)
    assert engine.adapters() == ()
    other = new_name()
    engine.load_adapter(other, adapter)
    assert proof_of(engine, lora_adder, other, adapter).failures == ()
    assert engine.replicas[0].restarts == 0


def test_tensors_in_the_request_reach_both_processes_of_an_attached_server(
    engine: ServedEngine, lora_adder: Adder, new_name: NewName, tmp_path: Path
) -> None:
    server = server_of(engine)
    attached = attach(lora_adder, [server.url], tmp_path, "Upload", server.headers)
    try:
        name, adapter = new_name(), random_adapter(lora_adder[0], 9)
        attached.load_adapter(name, adapter)
        proof = proof_of(attached, lora_adder, name, adapter)
        assert (proof.failures, proof.slot_digest) == ((), adapter.digest)
        attached.unload_adapter(name)
    finally:
        attached.close()


def test_layers_of_both_processes_are_looked_at_together(
    engine: ServedEngine, adder: Adder, new_name: NewName, on_rank: OnRank
) -> None:
    name, adapter = new_name(), random_adapter(adder[0], 10)
    engine.load_adapter(name, adapter)
    tokens = canary(adder[1])
    for asked in (None, name):
        assert len(engine.copies()[0].snapshot(tokens, asked).points) == 1 + 4 * 12 + 1
        found = compare(engine, adder[0], tokens, adapter, asked)
        assert found.is_clear, found.sentence()
        assert found.not_compared == ()


@pytest.mark.parametrize(
    ("tensor", "point", "name", "first"),
    [
        ("mlp.gate_up_proj.base_layer.weight", "mlp.up_proj", "mlp.up_proj.weight", [-1, 3]),
        ("mlp.down_proj.base_layer.weight", "mlp.down_proj", "mlp.down_proj.weight", [3, -1]),
        ("self_attn.qkv_proj.base_layer.weight", "self_attn.v_proj", "self_attn.v_proj.weight", [-1, 5]),
        ("self_attn.o_proj.base_layer.weight", "self_attn.o_proj", "self_attn.o_proj.weight", [7, -1]),
        # Whole on both: what one rank alone holds otherwise is in no result of the others.
        ("input_layernorm.weight", "self_attn.q_proj", "input_layernorm.weight", [9]),
    ],
)
def test_a_value_that_one_process_holds_otherwise_is_named_with_its_place_in_the_whole_tensor(
    engine: ServedEngine, adder: Adder, on_rank: OnRank, tensor: str, point: str, name: str, first: list[int]
) -> None:
    policy, tokenizer = adder
    adapter = random_adapter(policy, 10)
    held = take_snapshot(policy, canary(tokenizer), None, {}).tensors
    shape = held[f"model.layers.2.{name}"][0].shape
    weight, at = f"manager.base_model.model.layers[2].{tensor}.data", ", ".join(map(str, first))
    on_rank(engine, 1, f"{weight}[{at}] += 0.5")
    try:
        found = compare(engine, policy, canary(tokenizer), adapter, None)
    finally:
        on_rank(engine, 1, f"{weight}[{at}] -= 0.5")
    place = [index % size for index, size in zip(first, shape, strict=True)]
    assert found.point == f"model.layers.2.{point}", found.sentence()
    assert [cause.name for cause in found.causes] == [f"model.layers.2.{name}"]
    assert "1 of " in found.causes[0].detail
    assert f"first at {place}: " in found.causes[0].detail
    assert found.causes[0].detail.endswith(", on rank 1")


@pytest.mark.parametrize(
    ("config", "fault", "says"),
    [
        pytest.param(
            LORA_EXPERTS, "experts.down_lora_a_weights[slot, 3, 0] *= 2", "experts.w2.lora_A", id="LoRA-SharedOuter"
        ),
        pytest.param(
            OFT_EXPERTS, TRANSPOSED.format(layer="name + '.down_proj'"),
            "experts.w2.oft_R is transposed", id="OFT-Shared",
        ),
    ],
)  # fmt: skip
def test_adapters_of_experts_are_proven_of_both_processes_and_named_where_one_differs(
    inside: Path, on_rank: OnRank, tmp_path: Path, config: AdapterConfig, fault: str, says: str
) -> None:
    with serve("qwen3_moe", "INT4", config, tmp_path, tensor_parallel=2, moe_intermediate_size=64) as (policy, engine):
        adapters = {f"policy-v{seed}": random_adapter(policy, seed) for seed in (1, 2)}
        for name, adapter in adapters.items():
            engine.load_adapter(name, adapter)
            proof = proven(policy, engine, name, adapter)
            assert (proof.failures, proof.slot_digest) == ((), adapter.digest)
        check_samples(policy, engine, adapters)
        for name in (None, "policy-v1"):
            found = compare(engine, policy, list(PROMPTS[2]), adapters["policy-v1"], name)
            assert found.is_clear, found.sentence()
            assert found.not_compared == ()
        here = "name = 'model.layers.1.mlp.experts'\nexperts = manager.lora_modules[1].get(name)\n"
        on_rank(engine, 1, SLOT.format(name="policy-v2") + here + fault)
        told = " ".join(proven(policy, engine, "policy-v2", adapters["policy-v2"]).failures)
        assert f"rank 1: model.layers.1.mlp.{says}" in told
        assert failures_again(proven(policy, engine, "policy-v1", adapters["policy-v1"])) == []
