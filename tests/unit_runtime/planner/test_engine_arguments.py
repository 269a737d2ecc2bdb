"""`rollout.engineArguments`: what may be passed, what is Orbit's own, and what contradicts the plan."""

from __future__ import annotations

import pytest

from orbit_runtime.errors import ManifestError, UnsupportedError
from orbit_runtime.model_info.cards import card_facts
from orbit_runtime.model_info.gpus import find_gpu
from orbit_runtime.planner import Machine, check_verdict, judge, plan
from orbit_runtime.spec.engine_arguments import ALLOWED, OURS, argument_flags, argument_problems
from tests.unit_runtime.planner.test_planner import build

B200 = find_gpu("B200")
SMALL, KIMI, PRO = "Qwen/Qwen3-4B", "moonshotai/Kimi-K2.6", "deepseek-ai/DeepSeek-V4-Pro"


def where_of(repository: str, arguments: dict, gpus: int = 8, **blocks: dict) -> list[tuple[str, str]]:
    rollout = {"engine": "SGLang", "engineArguments": arguments, **blocks.pop("rollout", {})}
    run = build(repository, rollout=rollout, **blocks)
    made = plan(run, card_facts(repository), Machine(B200 if gpus else None, gpus, 4096 * 2**30))
    field = "spec.rollout.engineArguments."
    return [(each.where.removeprefix(field), each.message) for each in made.problems if each.where.startswith(field)]


def test_no_argument_is_both_ours_and_the_manifests() -> None:
    assert not set(ALLOWED) & set(OURS)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("form", ["{}", "--{}"])
def test_what_orbit_sets_is_refused_by_name_with_the_field_to_use(name: str, form: str) -> None:
    given = form.format(name)
    ((blamed, message, fix),) = argument_problems({given: 1, "page-size": 16})
    assert blamed == given
    assert message.startswith(f"`{given}` is set by Orbit: ")
    assert fix


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ep-size", 0, "takes at least 1"), ("ep-size", "8", "takes a whole number"),
        ("ep-size", True, "takes a whole number"), ("ep-size", 1.5, "takes a whole number"),
        ("ep-size", None, "takes a whole number"), ("ep-size", [1], "takes a whole number"),
        ("schedule-conservativeness", 11, "takes 0 to 10"), ("enable-mixed-chunk", 1, "takes true or false"),
        ("speculative-algorithm", "STANDALONE", "takes NEXTN, EAGLE, NGRAM"),
        ("speculative-algorithm", ["NGRAM"], "takes NEXTN, EAGLE, NGRAM"),
        ("ep_size", 8, "is not how this argument is written"), ("--ep-size", 8, "is not how this argument is written"),
        ("no-such-thing", 1, "is not an argument that Orbit passes on"),
    ],
)  # fmt: skip
def test_a_wrong_value_or_name_is_told(name: str, value: object, says: str) -> None:
    ((blamed, message, fix),) = argument_problems({name: value})
    assert blamed == name
    assert says in message
    assert fix


def test_a_manifest_is_refused_with_the_field_path() -> None:
    with pytest.raises(Exception, match=r"mem-fraction-static.*is set by Orbit: the planner computes it"):
        build(rollout={"engine": "SGLang", "engineArguments": {"mem-fraction-static": 0.9}})
    with pytest.raises(Exception, match="engineArguments"):
        build(rollout={"engine": "Torch", "engineArguments": {"page-size": 16}})


def test_arguments_become_flags_and_a_false_one_is_left_out() -> None:
    given = {"ep-size": 8, "enable-mixed-chunk": True, "disable-radix-cache": False, "schedule-policy": "lpm"}
    assert argument_flags(given) == ["--ep-size", "8", "--enable-mixed-chunk", "--schedule-policy", "lpm"]


@pytest.mark.parametrize(
    ("repository", "arguments", "blocks", "name", "says"),
    [
        (SMALL, {"ep-size": 8}, {}, "ep-size", "has no routed experts"),
        (KIMI, {"ep-size": 3}, {"adapter": {"experts": "None"}}, "ep-size", "8 GPUs cannot be divided by 3"),
        (KIMI, {"ep-size": 8}, {}, "ep-size", "are read back if experts are cut"),
        (SMALL, {"attn-dp-size": 3}, {}, "attn-dp-size", "8 GPUs cannot be divided by 3"),
        (SMALL, {"attn-dp-size": 4}, {"rollout": {"tensorParallel": 2}}, "attn-dp-size", "cannot be divided by 4"),
        (SMALL, {"enable-dp-lm-head": True}, {}, "enable-dp-lm-head", "several groups"),
        (KIMI, {"moe-a2a-backend": "deepep"}, {}, "moe-a2a-backend", "without `ep-size`"),
        (SMALL, {"speculative-algorithm": "NEXTN"}, {}, "speculative-algorithm", "has no layer that guesses"),
        (SMALL, {"speculative-num-steps": 3}, {}, "speculative-num-steps", "nothing speculates"),
        (SMALL, {"speculative-algorithm": "NGRAM"}, {"rollout": {"deterministic": True}}, "speculative-algorithm",
         "does not use the request's own seed"),
        (SMALL, {"speculative-algorithm": "NGRAM"}, {"adapter": {"type": "OFT"}}, "speculative-algorithm", "plug-in"),
        (SMALL, {"attention-backend": "fa3"}, {"rollout": {"deterministic": True}}, "attention-backend", "chooses"),
    ],
)  # fmt: skip
def test_what_contradicts_the_plan_is_refused(
    repository: str, arguments: dict, blocks: dict, name: str, says: str
) -> None:
    found = where_of(repository, arguments, **blocks)
    assert [each for each, _ in found] == [name], found
    assert says in found[0][1]


@pytest.mark.parametrize(
    ("repository", "arguments", "blocks"),
    [
        (KIMI, {"ep-size": 8, "moe-a2a-backend": "deepep"}, {"adapter": {"experts": "None"}}),
        (SMALL, {"attn-dp-size": 2, "enable-dp-lm-head": True}, {}),
        (SMALL, {"speculative-algorithm": "NGRAM", "speculative-num-draft-tokens": 4}, {}),
        (PRO, {"speculative-algorithm": "NEXTN"}, {}),
        (SMALL, {"chunked-prefill-size": 2048, "disable-radix-cache": True}, {}),
    ],
)
def test_what_fits_is_passed(repository: str, arguments: dict, blocks: dict) -> None:
    assert where_of(repository, arguments, **blocks) == []


def test_on_a_cpu_orbit_chooses_the_attention() -> None:
    assert [name for name, _ in where_of(SMALL, {"attention-backend": "fa3"}, gpus=0)] == ["attention-backend"]


def test_run_and_plan_refuse_alike_with_78() -> None:
    run = build(rollout={"engine": "SGLang", "engineArguments": {"ep-size": 2}})
    with pytest.raises(UnsupportedError, match="has no routed experts") as caught:
        check_verdict(judge(run, card_facts(SMALL), Machine(B200, 1, 2**40)))
    assert not isinstance(caught.value, ManifestError)
    assert caught.value.where == "spec.rollout.engineArguments.ep-size"


def test_passes_and_groups_of_attention_are_planned() -> None:
    def planned(repository: str = SMALL, **arguments: object) -> dict:
        run = build(repository, rollout={"engine": "SGLang", "engineArguments": arguments, "tensorParallel": 8})
        made = plan(run, card_facts(repository), Machine(B200, 8, 4096 * 2**30))
        return {**made.phases["rollout"], "per": made.kv_tokens}

    plain = planned()
    assert planned(**{"chunked-prefill-size": 1024})["engine workspace"] < plain["engine workspace"]
    grouped = planned(**{"attn-dp-size": 8})
    assert grouped["base (engine), replicated"] > plain["base (engine), replicated"]
    base = "base (engine)"
    mtp = planned(PRO, **{"speculative-algorithm": "NEXTN"})
    assert sum(size for name, size in mtp.items() if name.startswith(("base", base))) > sum(
        size for name, size in planned(PRO).items() if name.startswith(("base", base))
    )
