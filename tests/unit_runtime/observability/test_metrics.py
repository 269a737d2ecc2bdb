"""One table, three readings of it: the row, its JSON and Prometheus."""

from __future__ import annotations

import json
import math
import re

import pytest
from fakes.run_folder import synthetic_row
from prometheus_client.parser import text_string_to_metric_families

from orbit_runtime.errors import InternalError
from orbit_runtime.observability.metrics import (
    FIELDS,
    TIME_FIELDS,
    RunMetrics,
    build_row,
    format_value,
    parse_row,
    without_times,
)

CONTRACT = re.split(
    r"\s+",
    """step policy_version adapter_digest reward_mean reward_std reward_value reward_wrong reward_timeout reward_crash
groups groups_equal groups_masked loss kl kl_base entropy grad_norm clip_fraction dropped_fraction teacher_divergence
value_loss explained_variance validation_loss learning_rate
oft_series_error response_tokens_mean truncated_fraction turns_mean tool_calls tool_errors tokens
tokens_per_second parity_mean parity_p99 parity_max parity_k3 parity_outside parity_top1 parity_tokens
parity_limit parity_mean_replayed parity_mean_unreplayed router_agreement staleness_mean staleness_max
rollouts_waiting rollouts_unfinished prompts_cancelled tokens_cancelled tokens_unchosen prompts_tried prompts_too_hard
prompts_too_easy
seconds_collect seconds_score seconds_train
seconds_publish seconds_checkpoint seconds_evaluate seconds_total""",
)


def test_a_row_has_the_fields_of_the_contract_in_their_order() -> None:
    assert list(FIELDS) == CONTRACT
    assert list(json.loads(build_row(step=1).to_json())) == CONTRACT


def test_the_fields_that_differ_between_identical_runs_are_the_times() -> None:
    assert {name for name in CONTRACT if name.startswith("seconds_")} | {"tokens_per_second"} == TIME_FIELDS
    assert not set(without_times(synthetic_row(1))) & TIME_FIELDS


def test_a_missing_field_is_none_and_an_unknown_one_is_an_error() -> None:
    assert build_row(step=1)["loss"] is None
    with pytest.raises(InternalError, match="rewrd"):
        build_row(rewrd=1.0)


def test_a_row_survives_json_to_the_last_bit() -> None:
    row = synthetic_row(7)
    assert dict(parse_row(row.to_json())) == dict(row)


def test_numbers_that_json_has_no_words_for_survive_as_strings() -> None:
    row = build_row(loss=math.nan, grad_norm=math.inf, kl=-math.inf)
    strict = json.loads(row.to_json(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert strict["loss"] == "NaN"
    back = parse_row(row.to_json())
    assert math.isnan(back.number("loss") or 0.0)
    assert (back["grad_norm"], back["kl"]) == (math.inf, -math.inf)


def test_a_row_of_a_newer_version_can_be_read() -> None:
    assert parse_row('{"step": 3, "something_new": 1}')["step"] == 3


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("step", 12, "12"),
        ("reward_mean", 0.28125, "0.2812"),
        ("truncated_fraction", 0.25, "25.00%"),
        ("parity_mean", 1.234e-7, "1.23e-07"),
        ("loss", None, "-"),
        ("loss", math.nan, "nan"),
        ("adapter_digest", "sha256:ab", "sha256:ab"),
    ],
)
def test_a_value_for_people(name: str, value: float | str | None, shown: str) -> None:
    assert format_value(name, value) == shown


def test_prometheus_text_parses_and_carries_every_number_under_the_run_s_labels() -> None:
    metrics = RunMetrics(run="quickstart", namespace="team-a", attempt=2)
    metrics.set_target(60)
    metrics.observe(synthetic_row(1))
    metrics.observe(synthetic_row(2))
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    samples = {(s.name, *sorted(s.labels.items())): s.value for f in families.values() for s in f.samples}
    labels = (("attempt", "2"), ("namespace", "team-a"), ("run", "quickstart"))

    assert samples["orbit_run_step", *labels] == 2
    assert samples["orbit_run_step_target", *labels] == 60
    assert samples["orbit_run_tokens_total", *labels] == 2 * 1843
    outcomes = ("attempt", "2"), ("namespace", "team-a"), ("outcome", "timeout"), ("run", "quickstart")
    assert samples["orbit_run_reward_outcomes_total", *outcomes] == 4
    parity = ("attempt", "2"), ("namespace", "team-a"), ("run", "quickstart"), ("statistic", "limit")
    assert samples["orbit_run_parity", *parity] == 1e-5
    stage = ("attempt", "2"), ("namespace", "team-a"), ("run", "quickstart"), ("stage", "train")
    assert samples["orbit_run_stage_seconds", *stage] == 0.07
    assert all(name.startswith("orbit_run_") for name in families)
    assert all(family.documentation for family in families.values())


def test_two_runs_in_one_process_do_not_share_a_registry() -> None:
    one, other = RunMetrics(run="a"), RunMetrics(run="b")
    one.observe(synthetic_row(1))
    assert b'run="a"' not in other.render()


def test_the_parts_of_a_reward_stand_behind_the_tables_fields_and_survive_json() -> None:
    row = build_row(step=1, reward_part_correct_mean=0.25, **{"reward_part_not-long_mean": None})
    assert list(row)[len(FIELDS) :] == ["reward_part_correct_mean", "reward_part_not-long_mean"]
    assert row.reward_parts == {"correct": 0.25, "not-long": None}
    assert dict(parse_row(row.to_json())) == dict(row)
    assert dict(build_row(**{**row, "loss": 1.0}))["reward_part_correct_mean"] == 0.25
    assert build_row(step=1).reward_parts == {}
    assert format_value("reward_part_correct_mean", 0.25) == "0.2500"


def test_a_rewards_name_is_a_label_in_prometheus() -> None:
    metrics = RunMetrics(run="r", namespace="n", attempt=2)
    metrics.observe(build_row(reward_part_correct_mean=0.25, reward_part_short_mean=None))
    (family,) = [
        each
        for each in text_string_to_metric_families(metrics.render().decode())
        if each.name == "orbit_run_reward_part_mean"
    ]
    (sample,) = family.samples
    assert sample.value == 0.25
    assert sample.labels == {"namespace": "n", "run": "r", "attempt": "2", "reward": "correct"}


def test_what_was_evaluated_survives_json_and_has_a_series_by_environment_and_statistic() -> None:
    row = build_row(step=3, **{"eval_held-out_mean": 0.5, "eval_held-out_unscored": 2, "eval_sums_low": None})
    assert dict(parse_row(row.to_json())) == dict(row)
    assert row.evaluation == {
        ("held-out", "mean"): 0.5, ("held-out", "unscored"): 2.0, ("sums", "low"): None
    }  # fmt: skip
    metrics = RunMetrics(run="r")
    metrics.observe_evaluation(row)
    text = metrics.render().decode()
    assert 'orbit_run_evaluation{attempt="1",environment="held-out",namespace="",run="r",statistic="mean"} 0.5' in text
    assert 'environment="sums"' not in text
