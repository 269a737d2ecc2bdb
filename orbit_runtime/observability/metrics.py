"""The table of metrics: one row per number of a step, from which the JSON row and Prometheus are both built.

Belongs here: names, units, meanings and encodings of a step's numbers; what an engine's servers tell, under the run's
labels. To add a metric, add one row to `METRICS`.
Does not belong here: computing the numbers (they come back in results) and storing them (`loop.keep`).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from orbit_runtime.errors import InternalError
from orbit_runtime.types import ServerReading

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge
    from prometheus_client.metrics_core import Metric as Family

Value = int | float | str | None
Kind = Literal["gauge", "counter", "none"]

PREFIXES = ("sglang", "vllm")
"""Metric families about the engine; a server also exports families about its process and its HTTP."""
REPLICA_LABEL = "replica"
ENGINE_METRICS = {
    "orbit_engine_up": "1 where the server takes work, 0 while it is being brought back.",
    "orbit_engine_memory_bytes": "What the server's device holds, or on a CPU its processes.",
    "orbit_engine_restarts_total": "Times that the server was lost and brought back with its adapters.",
    "orbit_engine_missed_adapters_total": "Adapters that did not arrive by `adapterTransport` and came as files.",
}
RUN_LABELS = ("namespace", "run", "attempt")


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a step."""

    name: str
    unit: str
    help: str
    prometheus: str | None = None
    """Name of the series; several metrics may share one and differ in `label`. `None`: not exported."""
    kind: Kind = "gauge"
    label: tuple[str, str] | None = None
    """The one extra label of a shared series and its value here."""
    display: str = ".4g"
    """Format specification for people."""
    is_time: bool = False
    """Differs between two identical runs, so it is left out when runs are compared bit for bit."""


def _stage(stage: str, text: str) -> Metric:
    return Metric(
        f"seconds_{stage}", "s", text, "orbit_run_stage_seconds", label=("stage", stage), display=".3f", is_time=True
    )


def _outcome(outcome: str, text: str) -> Metric:
    name = "orbit_run_reward_outcomes"
    return Metric(f"reward_{outcome}", "samples", text, name, "counter", ("outcome", outcome), "d")


def _parity(statistic: str, unit: str, text: str) -> Metric:
    return Metric(f"parity_{statistic}", unit, text, "orbit_run_parity", label=("statistic", statistic), display=".3g")


METRICS: tuple[Metric, ...] = (
    Metric("step", "steps", "Steps finished, from 1.", "orbit_run_step", display="d"),
    Metric("policy_version", "versions", "Policy version published by this step.", "orbit_run_policy_version",
           display="d"),
    Metric("adapter_digest", "sha256", "Digest of the adapter published by this step.", kind="none", display="s"),
    Metric("reward_mean", "reward", "Mean reward of the step's scored samples.", "orbit_run_reward_mean",
           display=".4f"),
    Metric("reward_std", "reward", "Standard deviation of the reward over the step's scored samples.",
           "orbit_run_reward_std", display=".4f"),
    _outcome("value", "Samples whose reward is a number."),
    _outcome("wrong", "Samples that were not an answer: reward 0; they train."),
    _outcome("timeout", "Samples whose reward ran out of time: masked, never scored 0."),
    _outcome("crash", "Samples whose reward raised or was not a number: masked, never scored 0."),
    Metric("groups", "groups", "Groups sampled in the step; more than promptsPerStep under dynamic sampling.",
           "orbit_run_groups", label=("kind", "all"), display="d"),
    Metric("groups_equal", "groups", "Groups whose rewards are all equal: they give no gradient.", "orbit_run_groups",
           label=("kind", "equal"), display="d"),
    Metric("groups_masked", "groups", "Groups of which no rollout trains.", "orbit_run_groups",
           label=("kind", "masked"), display="d"),
    Metric("loss", "nats", "The algorithm's loss, reduced over the step.", "orbit_run_loss"),
    Metric("kl", "nats", "KL divergence from the reference, which is the adapter switched off.", "orbit_run_kl"),
    Metric("kl_base", "nats", "The same of the policy that sampled, over at most 2,048 tokens of the step's samples, "
           "without a KL term too.", "orbit_run_kl_base"),
    Metric("entropy", "nats", "Mean entropy of the sampled positions' distributions.", "orbit_run_entropy"),
    Metric("grad_norm", "norm", "Gradient norm before clipping.", "orbit_run_grad_norm"),
    Metric("clip_fraction", "share", "Share of tokens whose ratio was clipped.", "orbit_run_clip_fraction",
           display=".2%"),
    Metric("dropped_fraction", "share", "Share of tokens that importance sampling gave weight 0.",
           "orbit_run_dropped_fraction", display=".2%"),
    Metric("teacher_divergence", "nats", "Mean divergence from the teacher, over sampled tokens K3.",
           "orbit_run_teacher_divergence", display=".4f"),
    Metric("value_loss", "reward^2", "Loss of the critic, over the step's updates.", "orbit_run_value_loss"),
    Metric("explained_variance", "share", "Share of the returns' variance that the critic predicted before the step.",
           "orbit_run_explained_variance", display=".3f"),
    Metric("validation_loss", "nats", "SFT: mean loss per token of held-out answers, if the step measured it.",
           "orbit_run_validation_loss", display=".4f"),
    Metric("learning_rate", "rate", "Learning rate of the step's last optimizer update.", "orbit_run_learning_rate",
           display=".3g"),
    Metric("oft_series_error", "norm", "Bound on how far OFT's series is from an exact rotation.",
           "orbit_run_oft_series_error", display=".2g"),
    Metric("response_tokens_mean", "tokens", "Mean length of a completion.", "orbit_run_response_tokens_mean",
           display=".1f"),
    Metric("truncated_fraction", "share", "Share of completions cut off by maxNewTokens.",
           "orbit_run_truncated_fraction", display=".2%"),
    Metric("turns_mean", "turns", "Mean number of the policy's turns in an episode.", "orbit_run_turns_mean",
           display=".2f"),
    Metric("tool_calls", "calls", "Tool calls that the policy made.", "orbit_run_tool_calls", "counter",
           display="d"),
    Metric("tool_errors", "calls", "Those that were answered with an error: malformed, unknown, failed, out of time.",
           "orbit_run_tool_errors", "counter", display="d"),
    Metric("tokens", "tokens", "Tokens sampled in the step; under SFT, tokens of answers.", "orbit_run_tokens",
           "counter", display="d"),
    Metric("tokens_per_second", "tokens/s", "`tokens` over seconds_total.",
           "orbit_run_tokens_per_second", display=".0f", is_time=True),
    _parity("mean", "nats", "Mean |log-prob difference| between trainer and engine."),
    _parity("p99", "nats", "99th percentile of |log-prob difference|."),
    _parity("max", "nats", "Largest |log-prob difference|."),
    _parity("k3", "nats", "k3 estimate of the KL divergence between trainer and engine."),
    _parity("outside", "share", "Share of tokens whose probability ratio lies outside [0.9, 1.1]."),
    Metric("parity_top1", "share", "Share of the canary's tokens where both sides find the same one most probable.",
           "orbit_run_top1_agreement", display=".2%"),
    Metric("parity_tokens", "tokens", "Number of tokens in these statistics.", kind="none", display="d"),
    _parity("limit", "nats", "The limit that parity_mean is gated against."),
    _parity("mean_replayed", "nats", "Mean of the step's first micro-batch, through the experts that rollout chose."),
    _parity("mean_unreplayed", "nats", "The same through the experts that the trainer's routers choose."),
    Metric("router_agreement", "share", "Share of rollout's expert choices that the trainer's routers make too.",
           "orbit_run_router_agreement", display=".3%"),
    Metric("staleness_mean", "versions", "Mean number of policy versions by which a trained token was behind.",
           "orbit_run_staleness_mean", display=".2f"),
    Metric("staleness_max", "versions", "Largest number of policy versions by which a trained token was behind.",
           "orbit_run_staleness_max", display="d"),
    Metric("rollouts_waiting", "samples", "Samples of later steps that had ended when this one's were taken.",
           "orbit_run_rollouts_waiting", display="d"),
    Metric("rollouts_unfinished", "samples", "Samples of later steps that were still being played then.",
           "orbit_run_rollouts_unfinished", display="d"),
    Metric("prompts_cancelled", "prompts", "Prompts that the step cancelled (rollout.overSampling).",
           "orbit_run_prompts_cancelled", "counter", display="d"),
    Metric("tokens_cancelled", "tokens", "Tokens already sampled for these, which are discarded.",
           "orbit_run_tokens_cancelled", "counter", display="d"),
    Metric("tokens_unchosen", "tokens", "Tokens sampled in branches that no rollout of their episode contains.",
           "orbit_run_tokens_unchosen", "counter", display="d"),
    Metric("prompts_tried", "prompts", "With data.difficulty: prompts whose pass rate is known.",
           "orbit_run_pass_rates", label=("prompts", "tried"), display="d"),
    Metric("prompts_too_hard", "prompts", "Of these, those below data.difficulty.low.",
           "orbit_run_pass_rates", label=("prompts", "too hard"), display="d"),
    Metric("prompts_too_easy", "prompts", "Those above data.difficulty.high.",
           "orbit_run_pass_rates", label=("prompts", "too easy"), display="d"),
    _stage("collect", "Waiting for the step's completions; with maxStaleness most of it happens beside other stages."),
    _stage("score", "Scoring that sampling did not hide."),
    _stage("train", "Forward, backward and optimizer."),
    _stage("publish", "Writing, loading and proving the new adapter."),
    _stage("checkpoint", "The loop's time for making the step durable; most of it happens beside the next step. It is "
           "written with the next step's row, or at the end: empty until then, and if the process was killed before."),
    _stage("evaluate", "Measuring held-out data after the step; not part of seconds_total."),
    Metric("seconds_total", "s", "The whole step, including its checkpoint if there is a seconds_checkpoint.",
           "orbit_run_step_seconds", display=".3f", is_time=True),
)  # fmt: skip

FIELDS: tuple[str, ...] = tuple(metric.name for metric in METRICS)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}
TIME_FIELDS: frozenset[str] = frozenset(metric.name for metric in METRICS if metric.is_time)
STAGES: tuple[str, ...] = tuple(
    metric.label[1] for metric in METRICS if metric.label is not None and metric.label[0] == "stage"
)


REWARD_PART = Metric(
    "reward_part_<name>_mean",
    "reward",
    "With several rewards: this one's mean over the step's scored samples, before its weight.",
    "orbit_run_reward_part_mean",
    display=".4f",
)
"""A family of fields that follow the table's own, one for each reward of the manifest; their series have the label
`reward`, with at most as many values as a manifest may name rewards (32).
"""
_PART_FIELD = re.compile(r"reward_part_([A-Za-z][A-Za-z0-9_-]*)_mean")


def part_field(reward: str) -> str:
    """The row's field for one reward of several. Example: `part_field("correct") == "reward_part_correct_mean"`"""
    return f"reward_part_{reward}_mean"


EVALUATION = Metric(
    "eval_<name>_<statistic>",
    "reward",
    "After a step with an evaluation, for each of `spec.evaluation.environments` by name: the `mean` reward over "
    "prompts, the `low` and `high` end of its 95 % interval, `pass` (pass@k of all samples of a prompt) and the number "
    "of `unscored` samples.",
    "orbit_run_evaluation",
    display=".4f",
)
"""A family of fields, one for each environment and statistic; their series has both for labels. The evaluation before
the first step has a series and no row."""
EVALUATED = ("mean", "low", "high", "pass", "unscored")
_EVALUATION_FIELD = re.compile(rf"eval_([a-z0-9](?:[-a-z0-9.]*[a-z0-9])?)_({'|'.join(EVALUATED)})")


def evaluation_field(environment: str, statistic: str) -> str:
    """Example: `evaluation_field("held-out", "mean") == "eval_held-out_mean"`"""
    return f"eval_{environment}_{statistic}"


SOURCE = Metric(
    "source_<name>_<statistic>",
    "",
    "With weights, for each of `data.prompts` by the first part of its prompts' ids: the mean `reward` of the step, "
    "its `groups`, and how many `epochs` of it have been drawn.",
    "orbit_run_source",
)
"""A family of fields, one for each source and statistic; their series has both for labels."""
_SOURCE_FIELD = re.compile(r"source_(.+)_(reward|groups|epochs)")


def source_field(source: str, statistic: str) -> str:
    """Example: `source_field("gsm8k", "reward") == "source_gsm8k_reward"`"""
    return f"source_{source}_{statistic}"


def _is_family(name: str) -> bool:
    return any(each.fullmatch(name) for each in (_PART_FIELD, _EVALUATION_FIELD, _SOURCE_FIELD))


class MetricsRow(Mapping[str, Value]):
    """One step's numbers: every field of the table in its order, `None` where a number does not apply; behind them the
    parts of the reward (`REWARD_PART`), in the manifest's order, and what was evaluated behind the step (`EVALUATION`).

    Example: `build_row(step=1, reward_mean=0.28)["reward_mean"] == 0.28`
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Value]) -> None:
        parts = [name for name in values if _is_family(name)]
        unknown = sorted(set(values) - set(FIELDS) - set(parts))
        if unknown:
            raise InternalError(f"unknown metrics: {', '.join(unknown)}", where="observability.metrics")
        self._values: dict[str, Value] = {name: values.get(name) for name in (*FIELDS, *parts)}

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"MetricsRow({self._values!r})"

    @property
    def reward_parts(self) -> dict[str, float | None]:
        """Reward → its mean in this step; empty where the manifest has one reward only."""
        return {part[1]: self.number(name) for name in self if (part := _PART_FIELD.fullmatch(name))}

    @property
    def sources(self) -> dict[tuple[str, str], float | None]:
        """Source and statistic → the number; empty without weights."""
        return {(found[1], found[2]): self.number(name) for name in self if (found := _SOURCE_FIELD.fullmatch(name))}

    @property
    def evaluation(self) -> dict[tuple[str, str], float | None]:
        """Environment and statistic → the number; empty behind a step without an evaluation."""
        return {
            (found[1], found[2]): self.number(name) for name in self if (found := _EVALUATION_FIELD.fullmatch(name))
        }

    def number(self, name: str) -> float | None:
        """The field as a float; `None` where it is absent or text."""
        value = self._values[name]
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def to_json(self) -> str:
        """One line of JSON. NaN and the infinities, which JSON has no words for, travel as strings."""
        return json.dumps({name: _encode(value) for name, value in self._values.items()}, allow_nan=False)


def is_unscored(rows: Sequence[MetricsRow]) -> bool:
    """Steps of demonstrations: no group was sampled, so that there is no reward."""
    return bool(rows) and all(row["groups"] is None and row["reward_mean"] is None for row in rows)


def build_row(**values: Value) -> MetricsRow:
    """A row with the given fields; a missing field is `None`, an unknown one is an error."""
    return MetricsRow(values)


def parse_row(line: str | bytes) -> MetricsRow:
    """The inverse of `MetricsRow.to_json`; fields that a newer version wrote are dropped.

    Raises:
        ValueError: it is not a JSON object.
    """
    raw: dict[str, Any] = json.loads(line)
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    parts = [name for name in raw if _is_family(name)]
    return MetricsRow({name: _decode(raw.get(name)) for name in (*FIELDS, *parts)})


_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _encode(value: Value) -> Value:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _decode(value: Value) -> Value:
    return _WORDS.get(value, value) if isinstance(value, str) else value


def without_times(row: MetricsRow) -> dict[str, Value]:
    """The fields that two identical runs must agree on to the bit."""
    return {name: value for name, value in row.items() if name not in TIME_FIELDS}


def row_digest(row: MetricsRow) -> str:
    """Digest of what a stored row says for ever: not of its times, nor of an evaluation, which adds to it later."""
    lasting = {name: _encode(value) for name, value in without_times(row).items() if value is not None}
    text = json.dumps({name: value for name, value in lasting.items() if not _EVALUATION_FIELD.fullmatch(name)})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def format_value(name: str, value: Value) -> str:
    """A field for people: `-` where it is absent."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return str(value)
    spec = BY_NAME.get(name, REWARD_PART).display
    if spec == "d":
        return f"{round(value):d}"
    return f"{value:{spec}}" if spec != "s" else str(value)


class RunMetrics:
    """The Prometheus side of the table, in a registry of its own.

    `observe(row)` sets gauges and adds to counters; `render()` is the text of `/metrics`.
    """

    def __init__(self, *, run: str, namespace: str = "", attempt: int = 1) -> None:
        from prometheus_client import CollectorRegistry

        self.registry: CollectorRegistry = CollectorRegistry(auto_describe=True)
        self._labels = {"namespace": namespace, "run": run, "attempt": str(attempt)}
        self._series: dict[str, Gauge | Counter] = {}
        for metric in METRICS:
            self._declare(metric)
        assert REWARD_PART.prometheus is not None
        self._parts = self._gauge(REWARD_PART.prometheus, REWARD_PART.help, "reward")
        assert EVALUATION.prometheus is not None
        self._evaluation = self._gauge(EVALUATION.prometheus, EVALUATION.help, "environment", "statistic")
        assert SOURCE.prometheus is not None
        self._sources = self._gauge(SOURCE.prometheus, SOURCE.help, "source", "statistic")
        self._target = self._gauge("orbit_run_step_target", "Steps that the manifest asks for.")
        self._progress = self._gauge(
            "orbit_run_last_progress_timestamp_seconds", "When the last step or evaluation of the run ended."
        )
        self._sign = self._gauge(
            "orbit_run_last_sign_of_life_timestamp_seconds",
            "When a piece of the run's work last ended, within a step too: a decoding step, a micro-batch, an episode.",
        )

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        from prometheus_client import Gauge

        return Gauge(name, text, (*RUN_LABELS, *labels), registry=self.registry)

    def _declare(self, metric: Metric) -> None:
        from prometheus_client import Counter, Gauge

        if metric.prometheus is None or metric.prometheus in self._series:
            return
        sharing = [other for other in METRICS if other.prometheus == metric.prometheus]
        text = metric.help if len(sharing) == 1 else _SHARED_HELP[metric.prometheus]
        labels = RUN_LABELS if metric.label is None else (*RUN_LABELS, metric.label[0])
        kind = Counter if metric.kind == "counter" else Gauge
        self._series[metric.prometheus] = kind(metric.prometheus, text, labels, registry=self.registry)

    def observe(self, row: MetricsRow) -> None:
        """Takes a finished step. Call it once a step: counters add."""
        from prometheus_client import Counter

        for metric in METRICS:
            value = row.number(metric.name)
            if metric.prometheus is None or value is None:
                continue
            extra = {} if metric.label is None else {metric.label[0]: metric.label[1]}
            series = self._series[metric.prometheus].labels(**self._labels, **extra)
            if isinstance(series, Counter):
                series.inc(value)
            else:
                series.set(value)
        for reward, mean in row.reward_parts.items():
            if mean is not None:
                self._parts.labels(**self._labels, reward=reward).set(mean)
        for (source, statistic), value in row.sources.items():
            if value is not None:
                self._sources.labels(**self._labels, source=source, statistic=statistic).set(value)
        self.observe_evaluation(row)

    def observe_evaluation(self, row: MetricsRow) -> None:
        """Adds an evaluation's metrics, which are known later than those of its step."""
        for (environment, statistic), value in row.evaluation.items():
            if value is not None:
                self._evaluation.labels(**self._labels, environment=environment, statistic=statistic).set(value)

    def set_target(self, total: int) -> None:
        self._target.labels(**self._labels).set(total)

    def set_progress(self, timestamp: float) -> None:
        self._progress.labels(**self._labels).set(timestamp)

    def follow_signs(self, newest: Callable[[], float]) -> None:
        """Makes `render` include the time of the newest sign of life, in seconds since the epoch."""
        self._sign.labels(**self._labels).set_function(newest)

    def add_engine(self, read: Callable[[], Sequence[ServerReading]]) -> None:
        """Makes `render` include the metrics of the engine's servers."""
        self.registry.register(EngineCollector(read, self._labels))

    def render(self) -> bytes:
        """Prometheus text exposition format 0.0.4."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


class EngineCollector:
    """A collector for `prometheus_client`'s registry: asks at every scrape, and keeps nothing."""

    def __init__(self, read: Callable[[], Sequence[ServerReading]], labels: Mapping[str, str]) -> None:
        """
        Args:
            labels: the run's, which every series gets.
        """
        self._read = read
        self._labels = labels

    def describe(self) -> list[Family]:
        """Empty, so that no server is asked before the first scrape."""
        return []

    def collect(self) -> Iterator[Family]:
        """One family per name, however many servers have it."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        readings = self._read()
        if not readings:
            return
        names = (*self._labels, REPLICA_LABEL)
        up = GaugeMetricFamily("orbit_engine_up", ENGINE_METRICS["orbit_engine_up"], labels=names)
        memory = GaugeMetricFamily(
            "orbit_engine_memory_bytes", ENGINE_METRICS["orbit_engine_memory_bytes"], labels=names
        )
        restarts = CounterMetricFamily(
            "orbit_engine_restarts", ENGINE_METRICS["orbit_engine_restarts_total"], labels=names
        )
        missed = CounterMetricFamily(
            "orbit_engine_missed_adapters", ENGINE_METRICS["orbit_engine_missed_adapters_total"], labels=names
        )
        families: dict[str, Family] = {}
        for each in readings:
            values = (*self._labels.values(), each.replica)
            up.add_metric(values, float(each.is_up))
            restarts.add_metric(values, each.restarts)
            missed.add_metric(values, each.missed)
            if each.memory_bytes is not None:
                memory.add_metric(values, each.memory_bytes)
            for family in _relabelled(each.exposition, dict(zip(names, values, strict=True))):
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from (up, restarts, missed, memory, *families.values())


def _relabelled(exposition: str, labels: Mapping[str, str]) -> list[Family]:
    """Families of the engine; none where the text cannot be read."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        found = [each for each in text_string_to_metric_families(exposition) if each.name.startswith(PREFIXES)]
    except ValueError:
        return []
    for family in found:
        family.samples = [each._replace(labels={**each.labels, **labels}) for each in family.samples]
    return found


_SHARED_HELP = {
    "orbit_run_groups": "Groups of the step: all, those with equal rewards, those of which no rollout trains.",
    "orbit_run_reward_outcomes": "Samples by how their reward ended.",
    "orbit_run_pass_rates": "Prompts whose pass rate is known: all, those too hard, those too easy.",
    "orbit_run_parity": "Train-vs-rollout |log-prob difference| of the last step, and its limit.",
    "orbit_run_stage_seconds": "Seconds of each stage of the last step.",
}
