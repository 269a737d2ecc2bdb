"""The planner's choices and refusals: layouts, micro-batches, copies, what to change, and what is supported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from orbit_runtime.errors import ManifestError, UnsupportedError
from orbit_runtime.model_info.cards import card_facts
from orbit_runtime.model_info.gpus import find_gpu
from orbit_runtime.model_info.quantization import PRECISIONS
from orbit_runtime.model_info.weights import KVCacheSize
from orbit_runtime.planner import Machine, Plan, check_fits, plan
from orbit_runtime.planner.activations import Recompute
from orbit_runtime.planner.job import build_job
from orbit_runtime.planner.layout import Layout, possible_layouts
from orbit_runtime.planner.support.combinations import (
    FAMILY_NAMES,
    FORMATS,
    LIMITS,
    MOE_FAMILIES,
    PINNED,
    Combination,
    State,
    find_support,
)
from orbit_runtime.spec import OrbitRun

ROOT = Path(__file__).parents[3]
GIB = 2**30
B200, H100, RTX = find_gpu("B200"), find_gpu("H100"), find_gpu("RTX4090")


def build(repository: str = "Qwen/Qwen3-4B", **blocks: dict) -> OrbitRun:
    spec = {
        "model": {"uri": f"hf://{repository}"},
        "data": {"prompts": [{"uri": "p.jsonl"}]},
        "environment": {"rewards": [{"name": "r", "type": "ExactMatch"}]},
        "training": {"steps": 1},
    }
    for name, block in blocks.items():
        spec[name] = {**spec.get(name, {}), **block}
    return OrbitRun.model_validate(
        {"apiVersion": "orbitrl.dev/v1alpha1", "kind": "OrbitRun", "metadata": {"name": "a"}, "spec": spec}
    )


def planned(machine: Machine, repository: str = "Qwen/Qwen3-4B", **blocks: dict) -> Plan:
    return plan(build(repository, **blocks), card_facts(repository), machine)


def test_one_device_runs_torch_and_several_run_megatron_and_sglang() -> None:
    one, eight = planned(Machine(H100, 1)), planned(Machine(H100, 8))
    assert (one.trainer, one.engine, one.base_copies) == ("Torch", "Torch", "Shared")
    assert (eight.trainer, eight.engine, eight.base_copies) == ("Megatron", "SGLang", "Two")


def test_beside_servers_there_are_two_copies_of_the_base_and_the_documents_say_so() -> None:
    """Servers are processes of their own: only the torch engine multiplies by the trainer's tensors."""
    beside = planned(Machine(B200, 1), rollout={"engine": "SGLang"})
    assert (beside.trainer, beside.engine, beside.base_copies) == ("Torch", "SGLang", "Two")
    architecture, picture = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("ARCHITECTURE.md", "docs/pictures/step.svg")
    )
    said = re.search(r"\n([^.]*)the base exists once.*?: two copies\.", architecture, re.DOTALL)
    assert said is not None
    assert said[1].endswith("With the torch engine ")
    assert "one copy, or two of the same bytes" in picture


def test_a_model_that_fits_whole_is_replicated_and_not_divided() -> None:
    recomputed = {"recompute": "PerLayer"}
    assert planned(Machine(H100, 8), training=recomputed).layout.text() == "TP1 EP1 PP1 CP1 DP8"
    # Rather than to compute layers again, which takes a third longer.
    assert planned(Machine(H100, 8)).layout.text() == "TP2 EP1 PP1 CP1 DP4"


def test_a_larger_model_is_divided_as_little_as_it_must() -> None:
    made = planned(Machine(find_gpu("H200"), 8), "Qwen/Qwen3-235B-A22B", model={"maxSequenceLength": 8192})
    assert made.fits
    assert made.layout.expert == 8
    assert 1 < made.layout.tensor <= 8


def layouts(repository: str, sizes: dict[str, int], **blocks: dict) -> list[Layout]:
    job = build_job(build(repository, training={"parallel": sizes}, **blocks), Machine(H100, 8))
    return list(possible_layouts(card_facts(repository), 8, job))


def test_layouts_divide_heads_experts_and_gpus() -> None:
    kimi = "moonshotai/Kimi-K2.6"
    model = card_facts(kimi).architecture
    found = layouts(kimi, {})
    assert [layout.tensor for layout in found] == [1, 2, 4, 8]
    for layout in found:
        assert layout.num_gpus == 8
        assert model.num_heads % layout.tensor == 0
        assert model.num_experts % layout.expert == layout.expert % layout.tensor == 0
    assert {layout.tensor for layout in layouts(kimi, {"tensor": 4})} == {4}
    assert layouts(kimi, {"tensor": 3}) == []
    assert layouts(kimi, {"tensor": 4, "data": 4}) == [], "sixteen ranks"
    assert layouts(kimi, {"tensor": 4, "expert": 2}) == [], "experts in fewer parts than matrices"


def test_heads_of_keys_and_scales_are_dealt_out_whole() -> None:
    # Four heads of keys and values: eight ranks would share them.
    assert [layout.tensor for layout in layouts("Qwen/Qwen3-30B-A3B", {})] == [1, 2, 4]
    # Eight heads; of 9,728 rows of a feed-forward part, an eighth is 1,216, and blocks of FP8 have 128.
    assert [layout.tensor for layout in layouts("Qwen/Qwen3-4B", {})] == [1, 2, 4, 8]
    assert [layout.tensor for layout in layouts("Qwen/Qwen3-4B-FP8", {})] == [1, 2, 4]
    oft = {"adapter": {"type": "OFT", "oft": {"blockSize": 128}}}
    assert [layout.tensor for layout in layouts("Qwen/Qwen3-4B", {}, **oft)] == [1, 2, 4]


def test_ranks_on_a_cpu_are_as_many_as_the_sizes_need_and_all_in_one_memory() -> None:
    def of(**parallel: int) -> Plan:
        return planned(
            Machine(None, 0, 1024 * GIB), "Qwen/Qwen3-30B-A3B", training={"trainer": "Megatron", "parallel": parallel}
        )

    assert of().layout.text() == "TP1 EP1 PP1 CP1 DP1"
    assert of(tensor=2).layout.text() == "TP2 EP2 PP1 CP1 DP1"
    assert of(expert=4).layout.text() == "TP1 EP4 PP1 CP1 DP4"
    one, two = of(), of(expert=2)
    assert two.engine == "SGLang", "ranks hold no whole model that an engine could sample with"
    # Each replica holds all but the experts, of which it has half.
    assert one.phases["train"]["base (trainer)"] < two.phases["train"]["base (trainer)"]
    assert two.phases["train"]["runtime"] == one.phases["train"]["runtime"] * 3 // 2, "two ranks and a server"
    (problem,) = division_problems(Machine(None, 0, 1024 * GIB), "Qwen/Qwen3-30B-A3B", tensor=8)
    assert problem[1].endswith("4 heads of keys and values cannot be divided among 8 ranks")


def test_stages_hold_their_layers_and_ranks_of_a_context_their_tokens() -> None:
    def of(repository: str = "moonshotai/Kimi-K2.6", **parallel: int) -> dict[str, int]:
        made = planned(Machine(H100, 16), repository, training={"trainer": "Megatron", "parallel": parallel})
        assert not [each for each in made.problems if each.where.startswith("spec.training.parallel")]
        return made.phases["train"]

    flat, staged = of(tensor=8, expert=16), of(tensor=8, expert=8, pipeline=2)
    # 31 of 61 layers, the first of them dense: 30 layers of experts in 8 parts are as much as 60 in 16, all else is
    # half. Of two tables of the vocabulary, 163,840 x 7,168 in BF16, a stage has one.
    assert 0.95 * flat["base (trainer)"] < staged["base (trainer)"] < flat["base (trainer)"]
    name = "base (trainer), replicated"
    table = 163_840 * 7_168 * 2 * 7 / 8
    assert staged[name] == pytest.approx((flat[name] - 2 * table) * 31 / 61 + table, rel=0.01)
    assert staged["adapter"] < flat["adapter"]
    whole, halved = of("Qwen/Qwen3-4B", tensor=8), of("Qwen/Qwen3-4B", tensor=8, context=2)
    assert halved["activations"] == pytest.approx(whole["activations"] / 2, rel=0.01)
    assert halved["keys and values gathered"] > 0


def division_problems(machine: Machine, repository: str = "Qwen/Qwen3-4B", **parallel: int) -> list[tuple[str, str]]:
    made = planned(machine, repository, training={"trainer": "Megatron", "parallel": parallel})
    return [(each.where, each.message) for each in made.problems if each.where.startswith("spec.training.parallel")]


def test_an_impossible_division_is_refused_with_what_does_not_divide() -> None:
    for sizes, says in (
        ({"tensor": 7}, "32 attention heads cannot be divided among 7 ranks"),
        ({"pipeline": 37}, "36 layers cannot be divided into 37 stages"),
        ({"tensor": 16}, "8 heads of keys and values cannot be divided among 16 ranks"),
        ({"tensor": 4, "data": 4}, "the sizes are for 16 ranks, but the trainer has 8 GPUs"),
        ({"tensor": 2, "data": 2}, "the sizes are for 4 ranks, but the trainer has 8 GPUs"),
    ):
        assert division_problems(Machine(H100, 8), **sizes) == [
            ("spec.training.parallel", f"Qwen/Qwen3-4B cannot be divided like this: {says}")
        ]
    (found,) = division_problems(Machine(H100, 8), "moonshotai/Kimi-K2.6", tensor=2, expert=7)
    assert "384 experts cannot be divided among 7 ranks" in found[1]


def test_a_micro_batch_left_open_shrinks_until_it_fits_and_one_that_is_written_does_not() -> None:
    small = {"model": {"maxSequenceLength": 1024}, "rollout": {"maxRunningRequests": 16}}
    small["training"] = {"recompute": "None"}
    left_open = planned(Machine(RTX, 1), **small)
    assert left_open.fits
    assert left_open.micro_batch_tokens < 16384
    assert any("tokens a micro-batch do not fit" in note for note in left_open.notes)
    written = planned(Machine(RTX, 1), **small | {"training": {"recompute": "None", "microBatchTokens": 16384}})
    assert not written.fits
    assert written.problems[0].fix.startswith("write training.microBatchTokens: ")
    kept = plan(build(**small), card_facts("Qwen/Qwen3-4B"), Machine(RTX, 1), may_choose=False)
    assert kept.micro_batch_tokens == 16384


def test_a_pass_holds_what_a_teacher_said_of_its_tokens() -> None:
    """Hidden states of a teacher on the run's base, 2,560 numbers of two bytes; of a served one eight bytes for each of
    its likeliest tokens; nothing where one number a token is compared."""

    def train(**teacher: object) -> dict[str, int]:
        made = planned(Machine(H100, 1), algorithm={"teacher": teacher}, training={"microBatchTokens": 8192})
        return {name: size for name, size in made.phases["train"].items() if name.startswith("teacher's")}

    served = {"type": "Served", "endpoints": [{"url": "http://teacher:30000"}]}
    assert train() == {"teacher's states": 8192 * 2560 * 2}
    assert train(**served, over="TopK") == {"teacher's tokens": 8192 * 32 * 8}
    assert train(**served, over="TopK", topK=64) == {"teacher's tokens": 8192 * 64 * 8}
    assert train(**served, over="Sampled") == {}


def test_a_critic_is_divided_like_the_policys_adapter_and_has_a_head() -> None:
    """Half the policy's rank, and for hidden states of 2,560 numbers a head of as many weights and a bias."""
    head = 2560 + 1
    for machine, trainer, ranks in ((Machine(H100, 1), "Torch", 1), (Machine(H100, 8), "Megatron", 8)):
        lora = {"type": "LoRA", "lora": {"rank": 16}}
        critic = {"type": "PPO", "groupSize": 1, "critic": {"rank": 8}}
        made = planned(machine, adapter=lora, algorithm=critic)
        parts = made.phases["train"]
        assert (made.trainer, made.fits) == (trainer, True)
        assert parts["critic"] == parts["adapter"] // 2 + head * 4
        assert parts["optimizer"] == made.adapter.total * 8 // ranks
        assert parts["critic's optimizer"] == parts["optimizer"] // 2 + head * 8


def test_following_the_advice_makes_it_fit() -> None:
    small = {"model": {"maxSequenceLength": 1024}, "rollout": {"maxRunningRequests": 16}}
    whole = {"recompute": "None", "microBatchTokens": 16384}
    refused = planned(Machine(RTX, 1), **small, training=whole)
    (tokens,) = re.findall(r"microBatchTokens: (\d+)$", refused.problems[0].fix)
    assert planned(Machine(RTX, 1), **small, training=whole | {"microBatchTokens": int(tokens)}).fits


def test_auto_recomputes_as_little_as_fits_and_what_is_written_is_held() -> None:
    def made(machine: Machine, **training: object) -> Plan:
        rollout = {"maxRunningRequests": 16, "sampling": {"maxNewTokens": 512}}
        return planned(
            machine, model={"maxSequenceLength": 1024}, rollout=rollout, training={"microBatchTokens": 16384} | training
        )

    assert made(Machine(B200, 1)).recompute == "None"
    small = made(Machine(RTX, 1))
    assert (small.fits, small.recompute) == (True, "PerLayer")
    assert "training.recompute is PerLayer" in " ".join(small.notes)
    sizes = [sum(made(Machine(B200, 1), recompute=how).phases["train"].values()) for how in get_args(Recompute)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
    written = made(Machine(RTX, 1), recompute="None")
    assert (written.fits, written.recompute) == (False, "None")
    # With sequences of 16,384 tokens no smaller micro-batch helps.
    long = {"model": {"maxSequenceLength": 16384}, "rollout": {"maxRunningRequests": 1}}
    refused = planned(Machine(H100, 1), **long, training={"recompute": "None"})
    assert refused.problems[0].fix == "write training.recompute: PerLayer"
    assert planned(Machine(H100, 1), **long, training={"recompute": "PerLayer"}).fits


def test_a_cache_is_smaller_where_memory_is_short_but_not_for_the_torch_engine_with_requests_that_are_set() -> None:
    long = {"model": {"maxSequenceLength": 32768}, "training": {"microBatchTokens": 32768}}
    eight = planned(Machine(H100, 8), **long)
    assert eight.fits
    assert any("the others wait" in note for note in eight.notes)
    one = planned(Machine(H100, 1), **long)
    assert one.fits
    assert one.waits
    assert any("the others wait" in note for note in one.notes)
    assert not planned(Machine(H100, 1), **long, rollout={"maxRunningRequests": 512}).fits


def test_the_cpu_is_judged_by_its_memory() -> None:
    assert planned(Machine(None, 0, 256 * GIB), model={"maxSequenceLength": 512}).fits
    small = planned(Machine(None, 0, 8 * GIB), model={"maxSequenceLength": 512})
    assert not small.fits
    with pytest.raises(UnsupportedError, match=r"this machine has 8\.0"):
        check_fits(small)
    assert planned(Machine(None, 0, None)).fits


def test_linears_are_widened_on_a_cpu_where_that_takes_an_eighth_of_its_memory_at_most() -> None:
    small = {"maxSequenceLength": 512}
    wide, narrow = (planned(Machine(None, 0, size * GIB), model=small) for size in (64, 56))
    assert (wide.widens_base, narrow.widens_base, narrow.fits) == (True, False, True)
    facts = card_facts("Qwen/Qwen3-4B")
    # Norms are fp32 in any case.
    assert wide.phases["train"]["base, widened"] == pytest.approx(facts.num_bytes(), rel=1e-3)
    assert wide.total("train") - narrow.total("train") >= wide.phases["train"]["base, widened"]
    assert not planned(Machine(None, 0, None), model=small).widens_base
    # In BF16 the second copy is in the order that products read.
    ordered = planned(Machine(None, 0, 256 * GIB), model=small | {"computePrecision": "BF16"})
    assert ordered.phases["train"]["base, widened"] == pytest.approx(facts.num_bytes(), rel=1e-3)
    assert not planned(Machine(None, 0, 1024 * GIB), model=small, training={"trainer": "Megatron"}).widens_base
    assert not planned(Machine(B200, 1, 1024 * GIB)).widens_base


@pytest.mark.parametrize("compute", ["FP32", "BF16"])
def test_packed_linears_are_held_dense_in_the_compute_dtype_beside_their_bytes(compute: str) -> None:
    facts = card_facts("Qwen/Qwen3-4B")
    linears = [each for each in facts.weights if each.weight.is_linear]
    table = sum(each.num_bytes for each in facts.weights if each.weight.role == "embedding")
    packed = tuple(replace(each, format="INT4", num_bytes=each.num_bytes // 4) for each in linears)
    facts = replace(facts, precision="INT4", weights=(*packed, *(set(facts.weights) - set(linears))))
    run = build(model={"maxSequenceLength": 512, "precision": "INT4", "computePrecision": compute})
    made = plan(run, facts, Machine(None, 0, 256 * GIB))
    # In BF16 twice. The table is the output layer as well: fp32 in place of BF16, or BF16 as products read it.
    expected = 4 * sum(each.weight.num_parameters for each in linears) + table
    assert made.phases["train"]["base, widened"] == expected
    assert plan(run, facts, Machine(None, 0, 8 * expected - 1)).widens_base is False


def test_host_memory_and_disk_that_the_manifest_limits_are_checked() -> None:
    machine = Machine(H100, 8, host_bytes=8 * GIB, disk_bytes=GIB)
    messages = [problem.message for problem in planned(machine).problems]
    assert any("GiB of main memory, 8.0 are available" in message for message in messages)
    assert any("GiB of disk, 1.0 are available" in message for message in messages)


def test_halves_of_a_node_hold_one_side_each() -> None:
    made = planned(Machine(H100, 8), placement={"layout": "Split"}, rollout={"engine": "SGLang"})
    assert made.layout.num_gpus == 4
    assert "optimizer" not in made.phases["rollout"]
    assert "KV cache" not in made.phases["train"]
    of_two = planned(Machine(H100, 2), placement={"layout": "Split", "gpus": 2}, rollout={"engine": "SGLang"})
    assert (made.trainer, of_two.trainer) == ("Megatron", "Torch"), "by the trainer's own half"


def test_a_precision_that_the_checkpoint_has_not_is_refused() -> None:
    with pytest.raises(ManifestError, match="the manifest says INT4, the checkpoint is BF16") as wrong:
        planned(Machine(H100, 1), model={"precision": "INT4"})
    assert (wrong.value.where, wrong.value.exit_code) == ("spec.model.precision", 64)


@pytest.mark.parametrize(
    ("adapter", "where", "says"),
    [
        ({"targets": ["q_proj", "w_proj"]}, "spec.adapter.targets[1]", "`w_proj` matches no linear layer"),
        ({"lora": {"rank": 1024, "alpha": 1.0}, "targets": ["o_proj"]}, None, ""),
        ({"type": "OFT", "oft": {"blockSize": 48}}, "spec.adapter.oft.blockSize", "blocks of 48 do not divide"),
    ],
)
def test_an_adapter_that_suits_no_layer_is_refused(adapter: dict, where: str | None, says: str) -> None:
    if where is None:
        assert planned(Machine(H100, 1), adapter=adapter).adapter.num_layers == 36
        return
    with pytest.raises(ManifestError, match=re.escape(says)) as wrong:
        planned(Machine(H100, 1), adapter=adapter)
    assert wrong.value.where == where


def test_a_target_may_be_one_layers_whole_name() -> None:
    for target in ("model.layers.0.self_attn.q_proj", "layers.0.self_attn.q_proj"):
        assert planned(Machine(H100, 1), adapter={"targets": [target]}).adapter.num_layers == 1
    with pytest.raises(ManifestError, match="matches no linear layer"):
        planned(Machine(H100, 1), adapter={"targets": ["model.layers.0.self_attn"]})


def test_completions_in_rows_of_their_own_have_the_prompt_each() -> None:
    card, sampling = card_facts("Qwen/Qwen3-4B"), {"sampling": {"maxNewTokens": 256}}
    run = build(model={"maxSequenceLength": 1024}, rollout=sampling, training={"recompute": "None"})
    packed, padded = (
        plan(
            run,
            replace(card, architecture=replace(card.architecture, passes=passes)),
            Machine(B200, 1),
            may_choose=False,
        )
        for passes in ("packed", "sequences have a padded row each")
    )
    share = padded.phases["train"]["activations"] / packed.phases["train"]["activations"]
    assert share == pytest.approx(8 * 1024 / (1024 + 7 * 256))
    assert next(each for each in padded.notes if each not in packed.notes).startswith(
        "sequences have a padded row each; "
    )


def test_an_engine_in_the_trainers_process_keeps_keys_of_its_own_form_and_states_in_fp32() -> None:
    card, run = card_facts("Qwen/Qwen3-0.6B"), build(model={"maxSequenceLength": 1024})
    kv = KVCacheSize(100, own_bytes_per_token=300, state_bytes=7000)
    made = plan(run, replace(card, architecture=replace(card.architecture, kv=kv)), Machine(None, 0, 1024 * GIB))
    assert made.phases["rollout"]["KV cache"] == made.kv_sequences * (1024 * 300 * 2 + 7000)


def test_more_memory_never_turns_a_yes_into_a_no() -> None:
    for size in (24, 48, 79, 140, 178):
        card = replace(H100, usable_bytes=size * GIB)  # type: ignore[type-var]
        fits = planned(Machine(card, 8), "Qwen/Qwen3-30B-A3B-FP8").fits
        if fits:
            bigger = replace(card, usable_bytes=2 * size * GIB)
            assert planned(Machine(bigger, 8), "Qwen/Qwen3-30B-A3B-FP8").fits


def all_combinations() -> Iterator[Combination]:
    """The table's combinations: torch alone on one device, with SGLang on a CPU, Megatron with SGLang on 8 GPUs."""
    for engine, trainer, gpus in (("Torch", "Torch", 1), ("SGLang", "Torch", 0), ("SGLang", "Megatron", 8)):
        for family in FAMILY_NAMES:
            for form in FORMATS:
                for adapter in ("LoRA", "OFT"):
                    for experts in (
                        ("SharedOuter", "Shared", "PerExpert", "None") if family in MOE_FAMILIES else ("None",)
                    ):
                        yield Combination(form, family, adapter, experts, engine, trainer, gpus)


def test_every_family_of_the_tables_has_a_place_in_the_support_table() -> None:
    families = {card_facts(name).architecture.family for name in ("Qwen/Qwen3-4B", "openai/gpt-oss-120b")}
    assert families <= set(FAMILY_NAMES)
    assert all(find_support(each).state in get_args(State) for each in all_combinations())


@pytest.mark.parametrize(
    ("asked", "state", "says"),
    [
        (Combination("INT4", "qwen3", "LoRA", "None", "Torch", "Torch"), "works", ""),
        (Combination("BF16", "newest", "LoRA", "None", "Torch", "Torch"), "missing", "no test compares newest in BF16"),
        (Combination("BF16", "qwen2", "LoRA", "None", "Torch", "Torch"), "works", ""),
        (Combination("INT4", "qwen2", "LoRA", "None", "Torch", "Torch"), "planned", "no test compares qwen2 in INT4"),
        (Combination("BF16", "qwen2", "LoRA", "None", "SGLang", "Torch", 0), "planned", "no test compares qwen2"),
        (Combination("BF16", "qwen2", "LoRA", "None", "SGLang", "Megatron", 8), "missing", "no test compares qwen2"),
        (Combination("INT2", "qwen3", "LoRA", "None", "Torch", "Torch"), "missing", "no test compares qwen3 in INT2"),
        (Combination("BF16", "llama", "OFT", "None", "Torch", "Torch"), "works", ""),
        (Combination("NVFP4", "deepseek_v3", "OFT", "PerExpert", "Torch", "Torch"), "works", ""),
        (Combination("INT4", "gpt_oss", "OFT", "Shared", "Torch", "Torch"), "refused", "MXFP4, as released"),
        (Combination("INT4", "deepseek_v4", "OFT", "Shared", "Torch", "Torch"), "refused", "FP4 and FP8"),
        (
            Combination("MXFP4", "deepseek_v4", "LoRA", "SharedOuter", "SGLang", "Megatron", 8),
            "missing",
            "state of its own",
        ),
        (
            Combination("MXFP4", "deepseek_v4", "LoRA", "PerExpert", "SGLang", "Torch", 1, capability=(9, 0)),
            "planned",
            "over SGLang's Marlin kernels (Hopper, SM120), not run on hardware",
        ),
        (
            Combination("MXFP4", "deepseek_v4", "LoRA", "PerExpert", "SGLang", "Torch", 1, capability=(10, 0)),
            "refused",
            "on Hopper and on SM120 only",
        ),
        (
            Combination("MXFP4", "deepseek_v4", "LoRA", "None", "SGLang", "Torch", 1, capability=(10, 0)),
            "planned",
            "not run on hardware",
        ),
        (Combination("FP8", "deepseek_v4", "LoRA", "SharedOuter", "SGLang", "Torch", 1), "planned", "plug-in"),
        (Combination("MXFP4", "deepseek_v4", "LoRA", "None", "SGLang", "Torch", 1, True), "refused", "deterministic"),
        (Combination("BF16", "deepseek_v4", "OFT", "None", "SGLang", "Torch", 0), "refused", "on GPUs only"),
        (Combination("MXFP4", "gpt_oss", "LoRA", "SharedOuter", "SGLang", "Megatron", 8), "refused", "MXFP4 experts"),
        (Combination("INT4", "kimi_k2", "LoRA", "SharedOuter", "SGLang", "Megatron", 8), "planned", "on CPUs"),
        (Combination("INT4", "qwen3_moe", "OFT", "Shared", "SGLang", "Megatron", 0), "works", ""),
        (Combination("BF16", "qwen3", "LoRA", "None", "Torch", "Torch", 8), "works", ""),
        (Combination("INT4", "qwen3", "LoRA", "None", "SGLang", "Torch", 0), "works", ""),
        (Combination("NVFP4", "llama", "OFT", "None", "SGLang", "Torch", 0), "works", ""),
        (Combination("INT4", "qwen3", "OFT", "None", "SGLang", "Torch", 1), "planned", "not run on hardware"),
        (Combination("BF16", "qwen3_moe", "LoRA", "SharedOuter", "SGLang", "Torch", 0), "works", ""),
        (Combination("INT4", "qwen3_moe", "LoRA", "PerExpert", "SGLang", "Torch", 0), "works", ""),
        (Combination("MXFP4", "glm4_moe", "LoRA", "SharedOuter", "SGLang", "Torch", 0), "works", ""),
        (Combination("MXFP4", "glm4_moe", "LoRA", "SharedOuter", "SGLang", "Torch", 1), "refused", "MXFP4 experts"),
        (
            Combination("BF16", "qwen3_moe", "LoRA", "Shared", "SGLang", "Torch", 0),
            "refused",
            "shared on the outer side",
        ),
        (Combination("BF16", "qwen3_moe", "OFT", "Shared", "SGLang", "Torch", 0), "works", ""),
        (
            Combination("BF16", "qwen3_moe", "OFT", "PerExpert", "SGLang", "Torch", 0),
            "refused",
            "all experts share one R",
        ),
        (Combination("BF16", "qwen3_moe", "OFT", "Shared", "SGLang", "Torch", 1), "refused", "down_proj"),
        (
            Combination("BF16", "qwen3_moe", "OFT", "Shared", "SGLang", "Torch", 1, adapts_down=False),
            "planned",
            "not run on hardware",
        ),
        (Combination("MXFP4", "gpt_oss", "LoRA", "None", "SGLang", "Torch", 0), "refused", "on GPUs only"),
        (Combination("BF16", "qwen3_moe", "LoRA", "None", "OpenAI", "Torch", 0), "planned", "dense models only"),
        (
            Combination("MXFP4", "deepseek_v4", "OFT", "None", "SGLang", "Torch", 1),
            "planned",
            "DeepSeek-V4's attention",
        ),
        (Combination("BF16", "qwen3", "LoRA", "None", "Torch", "Megatron", 8), "refused", "torch trainer's process"),
        (Combination("BF16", "qwen3", "LoRA", "None", "SGLang", "Torch", 0, True), "refused", "deterministically"),
        (Combination("BF16", "qwen3", "LoRA", "None", "SGLang", "Torch", 1, True), "planned", "not run on hardware"),
        (Combination("BF16", "qwen3", "LoRA", "None", "Torch", "Torch", 0, True), "works", ""),
    ],
)
def test_what_is_supported_and_why_not(asked: Combination, state: str, says: str) -> None:
    found = find_support(asked)
    assert found.state == state
    assert says in " ".join(found.reasons)


def test_every_refusal_names_the_field_that_its_advice_is_about() -> None:
    refusals = [limit for limit in LIMITS if limit.state == "refused"]
    assert len(refusals) > 10
    spec = build().spec
    for limit in refusals:
        assert limit.what in limit.fix, limit
        part, name = limit.what.split(".")
        assert name in [field.alias for field in type(getattr(spec, part)).model_fields.values()], limit.what


def test_a_refused_combination_does_not_fit_whatever_the_memory() -> None:
    made = planned(
        Machine(B200, 8), "deepseek-ai/DeepSeek-V4-Flash",
        adapter={"targets": ["gate_proj"]}, training={"parallel": {"tensor": 8}},
    )  # fmt: skip
    assert not made.fits
    assert "LoRA on DeepSeek-V4's FP4 experts needs SGLang's Marlin kernels" in made.problems[0].message


def test_deterministic_sampling_by_sglang_on_the_cpu_is_refused_before_anything_is_taken() -> None:
    made = planned(Machine(None, 0), rollout={"engine": "SGLang", "deterministic": True})
    with pytest.raises(UnsupportedError, match="on GPUs only") as caught:
        check_fits(made)
    assert (caught.value.exit_code, caught.value.where) == (78, "spec.rollout.deterministic")
    assert planned(Machine(None, 0), rollout={"engine": "Torch", "deterministic": True}).fits
    assert planned(Machine(H100, 1), rollout={"engine": "SGLang", "deterministic": True}).fits


def test_the_versions_of_the_table_are_the_pinned_ones() -> None:
    pins = (ROOT / "images" / "constraints" / "node.txt").read_text()
    for name, version in PINNED.items():
        assert re.search(rf"^{re.escape(name)}=={re.escape(version)}( |$)", pins, re.MULTILINE), name


def test_the_formats_of_the_table_are_those_that_are_read() -> None:
    assert set(FORMATS) == set(PRECISIONS.values())
    assert all(
        find_support(Combination(name, "qwen3", "LoRA", "None", "Torch", "Torch")).state == "works" for name in FORMATS
    )
