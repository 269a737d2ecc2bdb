"""The table of engines and settings: each is given, or refused by its name in the manifest."""

from __future__ import annotations

from itertools import combinations

import pytest

from orbit_runtime.errors import UnsupportedError
from orbit_runtime.planner.support.manifests import IS_SET, LACKS, Kind, check_sampling, shaping_fields
from orbit_runtime.rollout.server_types import given_fields
from orbit_runtime.types import Sampling

SET: dict[str, Sampling] = {
    "temperature": Sampling(temperature=0.5),
    "topK": Sampling(top_k=8),
    "topP": Sampling(top_p=0.9),
    "minP": Sampling(min_p=0.1),
    "repetitionPenalty": Sampling(repetition_penalty=1.2),
    "logitBias": Sampling(logit_bias=((3, 1.0),)),
    "stop": Sampling(stop=("a",)),
    "stopTokenIds": Sampling(stop_token_ids=(5,)),
    "ignoreEos": Sampling(ignore_eos=True),
}
CUTS = {("topK",), ("topP",), ("minP",)}
SGLANG = {("repetitionPenalty",), ("ignoreEos", "stopTokenIds")}
REFUSED: dict[Kind, set[tuple[str, ...]]] = {
    "Torch": set(),
    "SGLang": SGLANG,
    "SGLang without plug-in": SGLANG | CUTS,
    "SGLang, deterministic": SGLANG | CUTS,
    "vLLM": {("minP", "topP")},
}


def together(*names: str) -> Sampling:
    """What the settings of several are, all at once."""
    default, values = Sampling(), {}
    for name in names:
        for field in Sampling.__slots__:
            if getattr(SET[name], field) != getattr(default, field):
                values[field] = getattr(SET[name], field)
    return Sampling(**values)


@pytest.mark.parametrize("kind", REFUSED)
def test_every_setting_and_every_pair_is_given_or_refused_by_name(kind: Kind) -> None:
    for names in [*((name,) for name in SET), *combinations(SET, 2)]:
        expected = [lack for lack in REFUSED[kind] if set(lack) <= set(names)]
        if not expected:
            check_sampling(together(*names), kind, "the server")
            continue
        with pytest.raises(UnsupportedError) as caught:
            check_sampling(together(*names), kind, "the server")
        assert caught.value.exit_code == 78
        assert caught.value.where in {f"spec.rollout.sampling.{lack[0]}" for lack in expected}
        assert "engine: Torch" in str(caught.value.fix)


def test_the_table_knows_every_setting() -> None:
    assert IS_SET.keys() == SET.keys()
    assert REFUSED.keys() == LACKS.keys()
    for name, is_set in IS_SET.items():
        assert [other for other in SET if is_set(SET[other])] == [name]


def test_a_setting_that_is_not_set_is_sent_at_its_default() -> None:
    """A server would take what is left out from the model's generation_config.json."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "ignore_eos", "logit_bias")
    assert given_fields(Sampling()) == dict(zip(names, (1.0, -1, 1.0, 0.0, 1.0, [], False, None), strict=True))
    asked = given_fields(together("topK", "minP", "repetitionPenalty", "logitBias", "ignoreEos"))
    assert asked == dict(zip(names, (1.0, 8, 1.0, 0.1, 1.2, [], True, {"3": 1.0}), strict=True))


def test_what_ends_a_completion_does_not_change_its_log_probs() -> None:
    assert shaping_fields(together("stop", "stopTokenIds", "ignoreEos")) == ()
    assert shaping_fields(together("temperature", "logitBias", "stop")) == ("temperature", "logitBias")
