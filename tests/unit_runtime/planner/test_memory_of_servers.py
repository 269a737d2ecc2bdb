"""A trainer and a server on one GPU: what each phase holds, what sleep gives back, and what the server is told."""

from __future__ import annotations

import pytest

from orbit_runtime.model_info.cards import card_facts
from orbit_runtime.model_info.gpus import find_gpu
from orbit_runtime.planner import Machine, Plan
from orbit_runtime.planner import assumptions as known
from orbit_runtime.planner.parts import server_prefill_tokens
from orbit_runtime.planner.verdict import plan_as_run
from tests.unit_runtime.planner.test_planner import build

SMALL, KIMI = "Qwen/Qwen3-4B", "moonshotai/Kimi-K2.6"
H100 = find_gpu("H100")
GIB = 2**30


def planned(gpus: int = 1, repository: str = SMALL, **blocks: dict) -> Plan:
    given: dict[str, dict] = {
        "model": {"maxSequenceLength": 4096}, "training": {"microBatchTokens": 4096, "trainer": "Torch"},
        "rollout": {"engine": "SGLang"},
    }  # fmt: skip
    for name, block in blocks.items():
        given[name] = {**given.get(name, {}), **block}
    return plan_as_run(build(repository, **given), card_facts(repository), Machine(H100, gpus, 2048 * GIB))


def test_a_server_that_does_not_sleep_keeps_its_cache_while_the_trainer_works() -> None:
    made = planned()
    cache = made.phases["rollout"]["KV cache"]
    assert cache > 0
    for phase in ("rollout", "train", "publish"):
        assert made.phases[phase]["KV cache"] == cache
        assert made.total(phase) <= (made.capacity or 0)
    assert "KV cache" not in made.phases["load"]


def test_what_sleeps_is_not_added_to_what_trains() -> None:
    awake, cache, everything = (planned(rollout={"sleep": sleep}) for sleep in ("None", "Cache", "All"))
    assert "KV cache" not in cache.phases["train"]
    assert "engine workspace" not in cache.phases["train"]
    assert cache.phases["train"]["base (engine)"] > 0
    assert not [name for name in everything.phases["train"] if name.startswith(("base (engine)", "KV"))]
    # SGLang releases graphs by a variable only, which its prefill graphs refuse.
    assert everything.phases["train"]["CUDA graphs"] == awake.phases["train"]["CUDA graphs"] == known.GRAPH_BYTES
    # The adapters stay where they are: what a publish proved is not loaded anew.
    slots = {made.phases["train"]["adapter slots"] for made in (awake, cache, everything)}
    assert slots == {awake.phases["rollout"]["adapter slots"]}
    # While a publish is proven the server is awake.
    assert everything.phases["publish"]["KV cache"] == everything.phases["rollout"]["KV cache"]
    base = sum(size for name, size in everything.phases["rollout"].items() if name.startswith("base (engine)"))
    assert everything.host_bytes == awake.host_bytes + base


def test_the_cache_that_sleeps_may_take_what_the_trainers_pass_needed() -> None:
    step = {"training": {"microBatchTokens": 8192}, "model": {"maxSequenceLength": 8192}}
    awake, asleep = (planned(rollout={"sleep": sleep}, **step) for sleep in ("None", "Cache"))
    assert awake.kv_sequences < asleep.kv_sequences


def test_a_server_holds_a_slot_for_each_version_one_for_preflight_and_one_for_the_base() -> None:
    made = planned()
    assert made.server_memory is not None
    assert made.server_memory.adapter_slots == known.ADAPTER_VERSIONS + 2 == 4
    one = made.adapter.dense * 2
    assert made.phases["rollout"]["adapter slots"] == 4 * one


def test_the_proof_of_a_publish_holds_copies_of_the_new_and_the_standing_slot() -> None:
    part = "adapter slots, copied"
    for made in (planned(), planned(8, KIMI, training={"trainer": "Megatron"})):
        assert made.phases["publish"][part] == made.phases["publish"]["adapter slots"] // 2
        assert not [phase for phase in ("load", "rollout", "train") if part in made.phases[phase]]
    # An engine with GPUs of its own proves while it samples; its trainer's GPUs hold none of it.
    split = planned(8, placement={"layout": "Split", "trainerGpus": 1}, rollout={"tensorParallel": 1})
    assert split.phases["rollout"][part] == split.phases["rollout"]["adapter slots"] // 2
    assert part not in split.phases["publish"]
    assert part not in planned(rollout={"engine": "Torch"}).phases["publish"]


@pytest.mark.parametrize(("card", "tokens"), [("RTX4090", 4096), ("H100", 8192), ("H200", 8192), ("B200", 16384)])
def test_a_prefill_pass_of_a_server_has_the_tokens_that_sglang_chooses_by_memory(card: str, tokens: int) -> None:
    found = find_gpu(card)
    assert found is not None
    assert server_prefill_tokens(found) == tokens
    run = build(KIMI, rollout={"engine": "SGLang"}, model={"maxSequenceLength": 16384})
    work = plan_as_run(run, card_facts(KIMI), Machine(found, 8)).phases["rollout"]["engine workspace"]
    # Marlin writes the product of each of a token's eight experts whole, on every GPU; hidden states are whole too.
    assert work > tokens * (8 * 7168 + 7168) * 2


def test_on_a_gpu_that_nobody_measured_a_margin_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    part, capacity = "reserve, GPU not measured", planned().capacity or 0
    for engine in ("Torch", "SGLang"):
        for parts in planned(rollout={"engine": engine}).phases.values():
            assert parts[part] == int(capacity * 0.05)
    monkeypatch.setattr(known, "MEASURED_GPUS", {"H100"})
    assert part not in planned().phases["train"]


def test_a_run_that_reads_the_memory_of_sleeping_servers_has_a_context_of_its_own_beside_its_ranks() -> None:
    ranks = {"trainer": "Megatron"}
    awake, asleep = (planned(8, training=ranks, rollout={"sleep": sleep}).phases["train"] for sleep in ("None", "All"))
    assert asleep["runtime (engine)"] - awake["runtime (engine)"] == known.BARE_CONTEXT_BYTES


def test_each_process_of_a_server_holds_the_adapters_it_loaded_in_main_memory() -> None:
    small, large = (planned(8, KIMI, adapter={"lora": {"rank": rank, "alpha": 1.0}}) for rank in (8, 16))
    more = large.adapter.total - small.adapter.total
    assert large.host_bytes - small.host_bytes == more * (known.CHECKPOINT_BYTES + 2) + 8 * 2 * more * 2


@pytest.mark.parametrize("sleep", ["None", "Cache", "All"])
@pytest.mark.parametrize(("gpus", "placement"), [(1, {}), (8, {"layout": "Split", "trainerGpus": 1})])
def test_by_sglangs_own_count_a_server_gets_the_cache_that_was_planned(sleep: str, gpus: int, placement: dict) -> None:
    made = planned(gpus, rollout={"engine": "SGLang", "sleep": sleep, "tensorParallel": 1}, placement=placement)
    told, rollout = made.server_memory, made.phases["rollout"]
    assert told is not None
    assert made.capacity is not None
    beside = sum(
        size
        for name, size in rollout.items()
        if name in ("runtime (trainer)", "runtime (engine)", "adapter", "optimizer")
        or name.startswith("base (trainer)")
    )
    free = made.capacity - beside
    loaded = rollout["adapter slots"] + sum(
        size for name, size in rollout.items() if name.startswith("base") and not name.startswith("base (trainer)")
    )
    # `rest_memory = available - total * (1 - mem_fraction_static)`, which `--max-total-tokens` bounds.
    rest = (free - loaded) - free * (1 - told.fraction)
    assert rest >= rollout["KV cache"] or told.fraction == 0.98
    assert told.kv_tokens == made.kv_tokens > 0
    # What is left beside the static part holds a pass, the graphs and what the allocator cannot use.
    left = free * (1 - told.fraction)
    assert left >= 0.8 * (rollout["CUDA graphs"] + rollout["engine workspace"] + rollout["reserve"])


def test_without_a_server_of_ours_nothing_is_told() -> None:
    assert planned(rollout={"engine": "Torch"}).server_memory is None
    on_cpu = plan_as_run(build(rollout={"engine": "SGLang"}), card_facts(SMALL), Machine(None, 0, 64 * GIB))
    assert on_cpu.server_memory is None
    assert on_cpu.server_devices == ()
