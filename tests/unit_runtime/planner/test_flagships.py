"""The six flagship manifests against the published memory plan of an eight-GPU node."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.model_info.cards import card_facts, find_card_facts
from orbit_runtime.model_info.gpus import CARDS, find_gpu
from orbit_runtime.planner import Machine, Plan, check_fits, plan
from orbit_runtime.planner.adapter_size import adapter_size
from orbit_runtime.planner.job import build_job
from orbit_runtime.spec import OrbitRun, load_manifest

GIB = 2**30
EXAMPLES = Path(__file__).parents[3] / "examples"
FLAGSHIPS = ("kimi-k2-6", "deepseek-v4-flash", "deepseek-v4-pro", "qwen3-235b-a22b", "qwen3-30b-a3b", "qwen3-4b")


def manifest(name: str, *overrides: str) -> OrbitRun:
    return load_manifest(EXAMPLES / f"{name}.yaml", [f"spec.{each}" for each in overrides])


def planned(name: str, *overrides: str, gpu: str | None = None) -> Plan:
    run = manifest(name, *overrides)
    facts = find_card_facts(run.spec.model.uri)
    assert facts is not None
    card = find_gpu(gpu or str(run.spec.placement.gpu_product))
    return plan(run, facts, Machine(card, run.spec.placement.gpus))


@pytest.mark.parametrize("name", [name for name in FLAGSHIPS if name != "deepseek-v4-pro"])
def test_every_flagship_fits_its_node(name: str) -> None:
    made = planned(name)
    assert made.problems == ()
    assert made.capacity is not None
    assert all(made.total(phase) <= made.capacity for phase in made.phases)


@pytest.mark.parametrize(
    ("name", "one_copy", "overrides"),
    [
        ("kimi-k2-6", 69.3, ()),
        ("deepseek-v4-flash", 18.6, ()),
        ("deepseek-v4-pro", 100.7, ()),
        ("qwen3-235b-a22b", 15.6, ()),
        ("qwen3-235b-a22b", 54.7, ("model.uri=hf://Qwen/Qwen3-235B-A22B", "model.precision=BF16")),
        # The whole of the published 31.2 and 4.41 GB.
        ("qwen3-30b-a3b", 31.2e9 / GIB, ("training.trainer=Torch", "rollout.engine=Torch")),
        ("qwen3-4b", 4.41e9 / GIB, ()),
    ],
)
def test_one_copy_of_the_base_takes_the_published_size(name: str, one_copy: float, overrides: tuple[str, ...]) -> None:
    load = planned(name, *overrides).phases["load"]
    # The engine's servers divide all by the node; the trainer's ranks by as many as share the heads of keys evenly.
    assert load.get("base (engine)", load.get("base", 0)) / GIB == pytest.approx(one_copy, rel=0.03)


@pytest.mark.parametrize(
    ("name", "size"),
    [("kimi-k2-6", 89.2), ("deepseek-v4-flash", 28.7), ("deepseek-v4-pro", 135.0)],
)
def test_with_experts_divided_and_the_rest_whole(name: str, size: float) -> None:
    """The published figures hold the MTP layer, whole, on every GPU; neither trainer nor engine loads it."""
    made = planned(name, "training.parallel.tensor=1")
    assert (made.layout.tensor, made.layout.expert) == (1, 8)
    facts = find_card_facts(manifest(name).spec.model.uri)
    assert facts is not None
    mtp = sum(stored.num_bytes for stored in facts.weights if stored.weight.role == "mtp")
    assert (made.base_bytes() + mtp) / GIB == pytest.approx(size, rel=0.03)
    assert any("MTP" in note for note in made.notes) == (mtp > 0)


@pytest.mark.parametrize(
    ("name", "both"),
    [("kimi-k2-6", 138.6), ("deepseek-v4-flash", 37.0), ("deepseek-v4-pro", 201.4)],
)
def test_two_copies_take_twice_that(name: str, both: float) -> None:
    load = planned(name, "placement.baseCopies=Two").phases["load"]
    found = load["base (trainer)"] + load["base (engine)"]
    assert found / GIB == pytest.approx(both, rel=0.03)


def test_v4_pro_would_need_one_copy_of_the_base_for_both_sides() -> None:
    made = planned("deepseek-v4-pro")
    assert (made.fits, made.base_copies) == (False, "Two")
    with pytest.raises(UnsupportedError, match=r"needs 2\d\d\.\d GiB in phase train, one B200 has 178\.3"):
        check_fits(made)
    shared = planned("deepseek-v4-pro", "placement.baseCopies=Shared")
    assert any(problem.where == "spec.placement.baseCopies" for problem in shared.problems)


def test_kimi_fits_eight_b200_with_two_copies() -> None:
    assert planned("kimi-k2-6").base_copies == "Two"


def test_kimi_is_refused_on_eight_h100_with_the_number() -> None:
    made = planned("kimi-k2-6", gpu="H100")
    assert not made.fits
    with pytest.raises(UnsupportedError, match=r"needs 1\d\d\.\d GiB in phase publish, one H100 has 79\.1") as refused:
        check_fits(made)
    assert refused.value.exit_code == 78
    assert refused.value.fix is not None
    assert "B200" in refused.value.fix


@pytest.mark.parametrize(
    ("adapter", "millions"),
    [
        ("{type: LoRA, lora: {rank: 16}, experts: None}", 72),
        ("{type: LoRA, lora: {rank: 16}, experts: Shared}", 99),
        ("{type: LoRA, lora: {rank: 16}, experts: SharedOuter}", 2360),
        ("{type: LoRA, lora: {rank: 16}, experts: PerExpert}", 10300),
        ("{type: LoRA, lora: {rank: 32}, experts: None}", 145),
        ("{type: LoRA, lora: {rank: 32}, experts: Shared}", 198),
        ("{type: LoRA, lora: {rank: 32}, experts: Auto}", 4700),
        ("{type: LoRA, lora: {rank: 32}, experts: PerExpert}", 20500),
        ("{type: OFT, oft: {blockSize: 32}, experts: None}", 24.9),
        ("{type: OFT, oft: {blockSize: 32}, experts: Auto}", 33.5),
        ("{type: OFT, oft: {blockSize: 32}, experts: SharedOuter}", 763),
        ("{type: OFT, oft: {blockSize: 32}, experts: PerExpert}", 3300),
    ],
)
def test_an_adapter_of_kimi_has_the_published_number_of_parameters(adapter: str, millions: float) -> None:
    targets = "[q_a_proj, kv_a_proj_with_mqa, q_b_proj, o_proj, gate_proj, up_proj, down_proj]"
    run = manifest("kimi-k2-6", f"adapter={adapter[:-1]}, targets: {targets}}}")
    facts = card_facts("moonshotai/Kimi-K2.6")
    size = adapter_size(facts.architecture, build_job(run, Machine(find_gpu("B200"), 8)))
    assert size.total / 1e6 == pytest.approx(millions, rel=0.01)


def test_saved_activations_are_the_published_ones() -> None:
    # 16K tokens on one GPU: 14.3, 23 and 57 GB, an eighth of it with the sequence divided by eight. They are of layers'
    # inputs in BF16; ours are fp32.
    for name, size in (("kimi-k2-6", 14.3e9), ("deepseek-v4-flash", 23e9), ("deepseek-v4-pro", 57e9)):
        made = planned(name, "training.recompute=PerLayer")
        assert made.phases["train"]["activations"] * 8 == pytest.approx(2 * size, rel=0.03)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_card_is_found_by_its_name_and_its_label(card: object) -> None:
    assert find_gpu(card.name.lower()) is card  # type: ignore[attr-defined]
    assert find_gpu(f"{card.products[0]}-80GB") is card  # type: ignore[attr-defined]
    assert find_gpu("a potato") is None
