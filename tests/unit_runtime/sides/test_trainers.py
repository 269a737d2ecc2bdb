"""What ranks are told to see, and what they need to be started."""

from __future__ import annotations

import pytest

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.sides.machine import machine_facts
from orbit_runtime.sides.trainers import (
    check_rank_packages,
    decide_by_size,
    decide_division,
    decide_new_tokens,
    visible_gpus,
)
from orbit_runtime.spec import Resolved, keep_decisions, parse_manifest, resolve


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        (None, ("1", "2")),
        ("", ("1", "2")),
        ("4,5,6,7", ("5", "6")),
        ("GPU-aa, GPU-bb, GPU-cc", ("GPU-bb", "GPU-cc")),
    ],
)
def test_ranks_see_the_gpus_that_the_run_was_given(shown: str | None, found: tuple[str, ...]) -> None:
    environment = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert visible_gpus((1, 2), environment) == found


def test_all_that_ranks_lack_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orbit_runtime.sides.trainers.find_spec", lambda _: None)
    with pytest.raises(UnsupportedError, match="need megatron and ray") as caught:
        check_rank_packages()
    assert (caught.value.exit_code, caught.value.where) == (78, "spec.training.trainer")
    assert "orbit-rl[megatron,ray]" in str(caught.value.fix)


LONG = """
apiVersion: orbitrl.dev/v1alpha1
kind: OrbitRun
metadata: {name: run}
spec:
  model: {uri: builtin://tiny-adder, maxSequenceLength: 1000000}
  data: {prompts: [{uri: p.jsonl}]}
  environment: {rewards: [{name: correct, type: ExactMatch}]}
  training: {steps: 5}
"""


def asked_with(*overrides: str) -> Resolved:
    named = [f"spec.{each}" for each in overrides]
    return resolve(parse_manifest(LONG, name="run.yaml", overrides=named, environ={}), machine_facts())


def test_what_memory_lacks_is_lowered_unless_prompts_are_short_and_an_open_rate_suits_the_size() -> None:
    folder = builtin_folder("tiny-adder", "INT4")
    asked = asked_with("rollout.sampling.maxNewTokens=256")
    lowered, short = decide_division(asked, folder), decide_division(asked, folder, lambda: 8)
    assert 1 <= lowered.running < 256 < short.running == 512
    assert decide_by_size(asked, folder).run.spec.training.decided_rate == 2e-3
    assert decide_by_size(asked, folder / "missing").run.spec.training.decided_rate == 1e-4


def test_an_open_length_is_what_the_prompts_leave_while_the_kv_cache_holds_it_and_is_kept() -> None:
    folder = builtin_folder("tiny-adder", "INT4")

    def length(asked: Resolved, longest: int = 24) -> int | None:
        return decide_new_tokens(asked, folder, lambda: longest).run.spec.rollout.sampling.max_new_tokens

    short = asked_with("model.maxSequenceLength=1024")
    assert length(short) == 1000
    assert length(asked_with("model.maxSequenceLength=1024", "rollout.sampling.maxNewTokens=7")) == 7
    long = length(asked_with())
    assert long is not None
    assert 256 <= long < 500_000
    assert decide_division(decide_new_tokens(asked_with(), folder, lambda: 24), folder, lambda: 24).running == 512, (
        "none waits"
    )
    assert (length(asked_with("rollout.maxRunningRequests=2")) or 0) > long, "fewer at once may be longer"
    assert length(short, 1000) == 24, "never halved below 256, nor above what is left"
    decided = decide_new_tokens(short, folder, lambda: 24)
    kept = keep_decisions(asked_with("model.maxSequenceLength=1024"), decided.run.to_manifest())
    assert (length(kept, 900), kept.identity) == (1000, decided.identity)
