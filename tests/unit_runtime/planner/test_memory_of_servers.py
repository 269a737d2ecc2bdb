"""A trainer and a server on one GPU: what each phase holds, what sleep gives back, and what the server is told."""

from __future__ import annotations

import pytest

from orbit_runtime.model_info.cards import card_facts
from orbit_runtime.model_info.gpus import find_gpu
from orbit_runtime.planner import Machine, Plan
from orbit_runtime.planner import assumptions as known
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
    assert not [name for name in everything.phases["train"] if name.startswith(("base (engine)", "KV", "CUDA"))]
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
