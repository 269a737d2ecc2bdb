"""How many GPUs a server takes, and what SGLang cannot cut over so many: each by its field, with what to write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.cards import card_facts
from orbit_runtime.model_info.checkpoint import folder_facts
from orbit_runtime.model_info.gpus import find_gpu
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner import Machine, check_fits, plan
from orbit_runtime.planner.job import Devices, Job, build_job
from orbit_runtime.planner.serving import check_servers, find_refusal, server_gpus
from tests.unit_runtime.planner.test_planner import build, planned

B200 = find_gpu("B200")
KIMI, FP8, SMALL = "moonshotai/Kimi-K2.6", "Qwen/Qwen3-235B-A22B-FP8", "Qwen/Qwen3-4B"


def job(repository: str = SMALL, **rollout: object) -> tuple[ModelFacts, Job]:
    adapter = rollout.pop("adapter", {})
    run = build(repository, rollout={"engine": "SGLang", **rollout}, adapter=adapter)  # type: ignore[arg-type]
    return card_facts(repository), build_job(run, Machine(B200, 8))


@pytest.mark.parametrize(
    ("repository", "rollout", "gpus", "size"),
    [
        (KIMI, {}, 8, 8),
        (SMALL, {"replicas": 2}, 8, 4),
        (SMALL, {"replicas": 3}, 8, 2),
        (SMALL, {"replicas": 8}, 8, 1),
        (SMALL, {"tensorParallel": 2}, 8, 2),
        (SMALL, {}, 1, 1),
        # A CPU has no GPUs to divide: only what is written.
        (SMALL, {}, 0, 1),
        (SMALL, {"tensorParallel": 2}, 0, 2),
        # 32 heads: 6 and 5 do not divide them.
        (SMALL, {}, 6, 4),
        # Its experts have 1536 inner features: an eighth would cut a block of 128 in two.
        (FP8, {}, 8, 4),
    ],
)
def test_a_server_takes_what_replicas_leave_it_as_far_as_the_model_can_be_cut(
    repository: str, rollout: dict, gpus: int, size: int
) -> None:
    facts, made = job(repository, **rollout)
    assert server_gpus(facts, made, gpus) == check_servers(facts, made, gpus) == size


@pytest.mark.parametrize(
    ("repository", "rollout", "gpus", "says", "where", "fix"),
    [
        (SMALL, {"tensorParallel": 3}, 8, "32 attention heads", "rollout.tensorParallel",
         "write tensorParallel: 1 or 2"),
        (SMALL, {"tensorParallel": 4, "replicas": 4}, 8, "4 x 4 GPUs are more than the 8", "rollout.tensorParallel",
         "write tensorParallel: 1 or 2"),
        (SMALL, {"replicas": 9}, 8, "9 x 1 GPUs are more than the 8", "rollout.replicas", "write replicas: 8 or less"),
        (FP8, {"tensorParallel": 8}, 8, "192 rows of .*gate_proj, a scale covers 128", "rollout.tensorParallel",
         "write tensorParallel: 1 or 2 or 4"),
        (SMALL, {"tensorParallel": 8, "adapter": {"type": "OFT", "oft": {"blockSize": 128}}}, 8,
         "1216 input features of .*down_proj, so blocks of 128 would be on two", "rollout.tensorParallel", "1 or 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_by_its_field(
    repository: str, rollout: dict, gpus: int, says: str, where: str, fix: str
) -> None:
    facts, made = job(repository, **rollout)
    with pytest.raises(UnsupportedError, match=says) as refused:
        check_servers(facts, made, gpus)
    assert (refused.value.exit_code, refused.value.where) == (78, f"spec.{where}")
    assert fix in str(refused.value.fix)


def with_heads(facts: ModelFacts, keys: int) -> ModelFacts:
    shape = facts.architecture
    return replace(facts, architecture=replace(shape, kv=replace(shape.kv, heads=keys)))


def test_heads_of_keys_are_dealt_out_or_repeated() -> None:
    facts, made = job(tensorParallel=4)
    for keys, fits in ((8, True), (4, True), (2, True), (1, True), (3, False), (6, False)):
        assert (find_refusal(with_heads(facts, keys), made, 8) is None) == fits
    # On a CPU SGLang pads them instead of repeating them.
    assert find_refusal(with_heads(facts, 2), made, 0) is not None


def test_a_cpu_needs_inner_widths_that_sglang_does_not_pad() -> None:
    """The shipped model's, 256, in halves and quarters of whole 32; a sixteenth is not."""
    facts = folder_facts(builtin_folder("tiny-adder", "INT4"))
    for size, says in ((2, None), (4, "2 heads of keys and values"), (3, "4 attention heads")):
        made = build_job(build(rollout={"engine": "SGLang", "tensorParallel": size}), Machine(None))
        found = find_refusal(facts, made, 0)
        assert (found is None) if says is None else (found is not None and says in found.message)
    narrow = replace(facts, weights=tuple(_narrowed(each) for each in facts.weights))
    made = build_job(build(rollout={"engine": "SGLang", "tensorParallel": 2}), Machine(None))
    found = find_refusal(narrow, made, 0)
    assert found is not None
    assert "at multiples of 32, but each of 2 processes would have 48" in found.message


def _narrowed(stored):  # type: ignore[no-untyped-def]
    weight = stored.weight
    shape = tuple(96 if size == 256 else size for size in weight.shape)
    return replace(stored, weight=replace(weight, shape=shape))


@pytest.mark.parametrize(
    ("precision", "block"),
    [("BF16", None), ("INT4", (1, 32)), ("FP8", (128, 128)), ("NVFP4", (1, 16)), ("MXFP4", (1, 32))],
)
def test_headers_say_for_how_many_columns_a_scale_is(precision: str, block: tuple[int, int] | None) -> None:
    folder = builtin_folder("tiny-adder", precision)
    config = json.loads((Path(folder) / "config.json").read_text()).get("quantization_config", {})
    groups = [group["weights"].get("group_size") for group in config.get("config_groups", {}).values()]
    groups += config.get("weight_block_size", ())[1:]
    (down,) = [s for s in folder_facts(folder).weights if s.weight.module == "model.layers.0.mlp.down_proj"]
    assert down.block == block
    assert groups == ([block[1]] if block else [])


def test_the_plan_shows_servers_and_divides_the_engines_part() -> None:
    whole = planned(Machine(B200, 8), rollout={"engine": "SGLang", "replicas": 8})
    cut = planned(Machine(B200, 8), rollout={"engine": "SGLang", "replicas": 2})
    assert (whole.servers, whole.server_gpus, cut.servers, cut.server_gpus) == (8, 1, 2, 4)
    sizes = [made.phases["rollout"]["base (engine)"] for made in (whole, cut)]
    assert sizes[0] == pytest.approx(4 * sizes[1], rel=0.01)
    assert cut.to_json()["server_gpus"] == 4


def test_experts_are_cut_as_marlin_multiplies_them() -> None:
    """768 columns over eight GPUs are 96 on each, and its kernel takes 64 at a time; 1536 are 192."""
    wide, narrow = "nvidia/Qwen3-235B-A22B-NVFP4", "nvidia/Qwen3-30B-A3B-NVFP4"
    assert planned(Machine(B200, 8), wide, rollout={"engine": "SGLang"}).server_gpus == 8
    assert planned(Machine(B200, 8), narrow, rollout={"engine": "SGLang"}).server_gpus == 4
    found = find_refusal(*job(narrow, tensorParallel=8), 8)
    assert found is not None
    assert "has 96" in found.message
    assert "Marlin multiplies 64 at a time" in found.message


def test_gpus_that_serve_nothing_are_told_with_the_reason() -> None:
    (told,) = [note for note in planned(Machine(B200, 8), FP8).notes if "are unused" in note]
    assert told.startswith("4 of 8 GPUs are unused: each of 8 GPUs has 192 rows of")
    (told,) = [
        note
        for note in planned(Machine(B200, 8), rollout={"engine": "SGLang", "replicas": 3}).notes
        if "are unused" in note
    ]
    assert told == "2 of 8 GPUs are unused: 3 servers share them evenly"


def test_the_plan_refuses_what_cannot_be_cut() -> None:
    made = planned(Machine(B200, 8), rollout={"engine": "SGLang", "tensorParallel": 7})
    with pytest.raises(UnsupportedError, match="32 attention heads cannot be divided among 7 GPUs"):
        check_fits(made)
    assert made.problems[0].where == "spec.rollout.tensorParallel"


def test_a_trainer_on_one_gpu_leaves_the_others_to_servers() -> None:
    run = build(rollout={"engine": "SGLang"}, training={"trainer": "Torch"})
    made = plan(run, card_facts(SMALL), Machine(B200, 1), devices=Devices(range(1), range(8)))
    assert (made.server_gpus, made.problems) == (8, ())
