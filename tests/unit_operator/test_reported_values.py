"""Whatever a pod says of itself, live or as it ends, its run's status is one that the API server takes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import orjson
import pytest

pytest.importorskip("kopf", reason="the operator's packages are not installed (extra `operator`)")
from hypothesis import given
from hypothesis import strategies as st
from unit_operator.cluster_model import Cluster, build_cluster

from orbit_operator.events import build_event
from orbit_operator.facts import ContainerEnd, Progress
from orbit_operator.observe import newest_word
from orbit_operator.poll import read_progress
from orbit_operator.reported_values import read_count, read_number, read_seconds, read_text
from orbit_runtime.spec.status import LARGEST_NUMBER, MAX_COUNT, RunStatus

NAMES = (
    "phase", "step", "total", "reward", "parity", "parity_limit", "policy_version", "adapter_digest", "last_checkpoint",
    "last_checkpoint_step", "tokens_per_second", "eta_seconds", "execution", "resumed_from_step", "best",
    "live", "reason", "message", "where", "fix",
)  # fmt: skip
EDGES = (0, -1, MAX_COUNT, MAX_COUNT + 1, 2**63, 10**18, 10**19, 1e18, 1.1e18, -1e19, 1e308, float("nan"), float("inf"))
HALF = "\ud800"
"""Of a character: JSON may name it, UTF-8 cannot write it."""
WORDS = (f"a{HALF}b", HALF * 40, "x" * 900, "x" * 3900, "Running", "")
NUMBERS = st.one_of(st.sampled_from(EDGES), st.integers(), st.floats())
TEXTS = st.one_of(st.sampled_from(WORDS), st.text(max_size=20))
BEST = st.fixed_dictionaries({"step": NUMBERS, "evaluation": TEXTS, "value": NUMBERS})
OTHERS = st.one_of(st.none(), st.booleans(), st.lists(st.integers(), max_size=2), BEST)
SAID = st.fixed_dictionaries(
    {"run": st.just("adder")}, optional={name: st.one_of(NUMBERS, TEXTS, OTHERS) for name in NAMES}
)
CODES = st.sampled_from([0, 1, 66, 75, 82, 85, 137, 255])


def begun() -> Cluster:
    cluster = build_cluster(max_infra_restarts=3)
    work(cluster, None)
    cluster.run_pod()
    return cluster


def work(cluster: Cluster, progress: Progress | None) -> None:
    """One pass; what it writes and says must be possible."""
    observed = cluster.observe(progress)
    chosen = cluster.think(observed)
    for action in chosen.actions:
        cluster.carry_out(action)
    cluster.write_status(observed, chosen)
    RunStatus.model_validate(cluster.status)
    orjson.dumps(cluster.status)
    for event in chosen.events:
        orjson.dumps(build_event(cluster.run, event, "name", "holder", 0.0))


@pytest.mark.parametrize("name", NAMES)
def test_each_thing_that_a_pod_says_may_be_anything(name: str) -> None:
    for value in (*EDGES, *WORDS, None, True, [1], {"a": 1}):
        said = {"run": "adder", "live": False, name: value}
        cluster = begun()
        (pod,) = cluster.pods.values()
        work(cluster, read_progress(said, "adder", pod.uid, cluster.now))
        cluster.exit(82)
        end_with(cluster, ContainerEnd(82, message=json.dumps(said), finished=cluster.now))


@given(SAID, SAID, CODES)
def test_whatever_a_pod_says_the_status_is_one_that_can_be_written(
    live: dict[str, Any], last: dict[str, Any], code: int
) -> None:
    cluster = begun()
    (pod,) = cluster.pods.values()
    work(cluster, read_progress(live, "adder", pod.uid, cluster.now))
    cluster.exit(code)
    end_with(cluster, ContainerEnd(code, message=json.dumps(last)[:4096], finished=cluster.now))


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=4096), CODES)
def test_so_it_is_for_last_words_that_are_only_text(text: str, code: int) -> None:
    cluster = begun()
    cluster.exit(code)
    end_with(cluster, ContainerEnd(code, message=text, finished=cluster.now))


@pytest.mark.parametrize("text", ["[" * 4096, '{"a":' * 600, '{"step": 1e999}', '{"step": ' + "9" * 4000 + "}"])
def test_json_that_is_too_deep_or_too_large_is_only_text(text: str) -> None:
    cluster = begun()
    cluster.exit(82)
    end_with(cluster, ContainerEnd(82, message=text, finished=cluster.now))
    assert cluster.status["attempts"][0]["step"] == 0


def end_with(cluster: Cluster, end: ContainerEnd) -> None:
    (uid,) = cluster.pods
    cluster.pods[uid] = replace(cluster.pods[uid], end=end)
    word = newest_word("adder", tuple(cluster.pods.values()), cluster.observe().stored, None)
    work(cluster, word)
    cluster.conclude_jobs()
    work(cluster, word)
    assert "ending" in cluster.status["attempts"][0]


@pytest.mark.parametrize(
    ("value", "count", "number", "seconds"),
    [
        (0, 0, 0.0, 0.0),
        (7, 7, 7.0, 7.0),
        (1.5, None, 1.5, 1.5),
        (-1, None, -1.0, None),
        (True, None, None, None),
        ("7", None, None, None),
        (None, None, None, None),
        (MAX_COUNT, MAX_COUNT, float(MAX_COUNT), float(MAX_COUNT)),
        (MAX_COUNT + 1000, None, float(MAX_COUNT + 1000), None),
        (LARGEST_NUMBER * 2, None, None, None),
        (float("nan"), None, None, None),
        (10**400, None, None, None),
    ],
)
def test_what_cannot_be_true_is_not_taken_over(
    value: object, count: int | None, number: float | None, seconds: float | None
) -> None:
    said = {"it": value}
    assert (read_count(said, "it"), read_number(said, "it"), read_seconds(said, "it")) == (count, number, seconds)


def test_texts_are_cut_and_hold_whole_characters() -> None:
    assert read_text({"it": "abc"}, "it", 2) == "ab"
    assert read_text({"it": "a\ud800b数"}, "it", 9) == "a?b数"
    assert read_text({"it": 5}, "it", 9) is None
    assert read_text({}, "it", 9) is None
