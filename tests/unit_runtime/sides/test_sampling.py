"""What a manifest asks of sampling: as the engine gets it, and refused before anything is fetched or trained."""

from __future__ import annotations

from typing import Any

import pytest

from orbit_runtime.errors import ManifestError, UnsupportedError
from orbit_runtime.planner.support.manifests import check_engine, check_token_ids, sampling_of
from orbit_runtime.spec.rollout import Rollout
from orbit_runtime.spec.run import RunSpec
from orbit_runtime.types import Sampling


def spec(**rollout: Any) -> RunSpec:
    fields: dict[str, Any] = {
        "model": {"uri": "builtin://tiny-adder"},
        "data": {"prompts": [{"uri": "builtin://two-digit-addition"}]},
        "environment": {"rewards": [{"name": "correct", "type": "ExactMatch"}]},
        "training": {"steps": 5},
        "rollout": rollout,
    }
    return RunSpec.model_validate(fields)


def test_defaults_are_the_models_own_distribution() -> None:
    assert sampling_of(spec().rollout) == Sampling()
    assert Rollout().sampling == spec(sampling={}).rollout.sampling


def test_every_field_reaches_the_engine() -> None:
    asked = {
        "temperature": 0.5, "topP": 0.9, "topK": 40, "minP": 0.1, "repetitionPenalty": 1.2, "maxNewTokens": 7,
        "logitBias": {"9": 1, "3": -2.5}, "stop": ["a"], "stopTokenIds": [4], "ignoreEos": True,
    }  # fmt: skip
    assert sampling_of(spec(sampling=asked).rollout) == Sampling(
        temperature=0.5, top_p=0.9, max_new_tokens=7, stop=("a",), top_k=40, min_p=0.1, repetition_penalty=1.2,
        logit_bias=((3, -2.5), (9, 1.0)), stop_token_ids=(4,), ignore_eos=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sampling", "where"),
    [
        ({"logitBias": {"7": 1.0, "64": 1.0}}, "spec.rollout.sampling.logitBias.64"),
        ({"stopTokenIds": [1, 99]}, "spec.rollout.sampling.stopTokenIds[1]"),
    ],
)
def test_a_token_that_the_model_does_not_have_is_refused(sampling: dict[str, Any], where: str) -> None:
    check_token_ids(spec(sampling=sampling), 100)
    with pytest.raises(ManifestError) as caught:
        check_token_ids(spec(sampling=sampling), 64)
    assert (caught.value.exit_code, caught.value.where) == (64, where)


def test_what_a_server_of_ours_does_not_give_is_refused_before_it_is_started() -> None:
    check_engine(spec(engine="SGLang", sampling={"topK": 5, "topP": 0.9, "minP": 0.1}))
    check_engine(spec(engine="Torch", sampling={"repetitionPenalty": 1.1}))
    check_engine(spec(engine="OpenAI", endpoints=[{"url": "http://a"}], sampling={"repetitionPenalty": 1.1}))
    for rollout, field in (
        ({"sampling": {"repetitionPenalty": 1.1}}, "repetitionPenalty"),
        ({"sampling": {"topK": 5}, "deterministic": True}, "topK"),
        ({"sampling": {"ignoreEos": True, "stopTokenIds": [3]}}, "ignoreEos"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            check_engine(spec(engine="SGLang", **rollout))
        assert (caught.value.exit_code, caught.value.where) == (78, f"spec.rollout.sampling.{field}")
