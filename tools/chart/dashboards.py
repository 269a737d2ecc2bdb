"""The two Grafana dashboards as tables: one row per panel.

Belongs here: titles, queries, units. Does not belong here: Grafana's JSON (`grafana`).
"""

from __future__ import annotations

import re
from typing import Any

from orbit_operator.metrics import RUN_SERIES, Metrics
from orbit_runtime.observability.metrics import ENGINE_METRICS, RunMetrics
from tools.chart.grafana import Dashboard, Panel, Variable, render_dashboard

FLEET = Dashboard(
    name="fleet",
    uid="orbit-fleet",
    title="Orbit: fleet",
    variables=(Variable("namespace", "label_values(orbit_run_info, namespace)", is_multi=True),),
    num_open=3,
    rows={
        "Now": (
            Panel("Runs that train", "stat", {"": 'count(orbit_run_phase{@, phase="Running"} == 1) or vector(0)'}),
            Panel("GPUs held", "stat", {"": "sum(orbit_run_gpus{@}) or vector(0)"}),
            Panel(
                "Waiting or queued",
                "stat",
                {"": 'count(orbit_run_phase{@, phase=~"Pending|Starting|Queued|Restarting"} == 1) or vector(0)'},
            ),
            Panel(
                "GPU time lost, 24 h",
                "stat",
                {
                    "": 'sum(increase(orbit_run_gpu_seconds_total{@, kind="lost"}[24h]))'
                    " / sum(increase(orbit_run_gpu_seconds_total{@}[24h]))"
                },
                unit="percentunit",
            ),
            Panel(
                "Runs",
                "table",
                {
                    "": "max by (namespace, run, phase, reason, owner) (orbit_run_phase{@} == 1)",
                },
                width=24,
                text="Every run's phase, and who must act. The name of a run leads to its own dashboard.",
                run_link="/d/orbit-run?var-namespace=${__data.fields.namespace}&var-run=${__data.fields.run}",
            ),
        ),
        "Over time": (
            Panel("Runs by phase", "stack", {"{{phase}}": "sum by (phase) (orbit_run_phase{@})"}, width=12),
            Panel(
                "GPU time",
                "stack",
                {"{{kind}}": "sum by (kind) (rate(orbit_run_gpu_seconds_total{@}[$__rate_interval]))"},
                unit="short",
                width=12,
                text="GPUs that trained usefully, whose work was lost, and that waited.",
            ),
            Panel(
                "Attempts that ended, per hour",
                "stack",
                {"{{class}}": "sum by (class) (increase(orbit_run_attempts_total{@}[1h]))"},
                text="On whose account: `free` on request, `infra` cluster or hardware, `user` the manifest.",
            ),
            Panel(
                "Why they ended, 24 h",
                "stack",
                {
                    "{{reason}}, {{owner}}": "count by (reason, owner)"
                    " (time() - orbit_run_last_end_timestamp_seconds{@} < 86400)"
                },
                text="The newest end of each run, and who must act.",
            ),
            Panel("Step", "line", {"{{namespace}}/{{run}}": "max by (namespace, run) (orbit_run_step{@})"}, width=12),
            Panel(
                "Reward",
                "line",
                {"{{namespace}}/{{run}}": "max by (namespace, run) (orbit_run_reward_mean{@})"},
                width=12,
            ),
            Panel(
                "Tokens per second",
                "line",
                {"{{namespace}}/{{run}}": "max by (namespace, run) (orbit_run_tokens_per_second{@})"},
                width=12,
            ),
        ),
        "Operator": (
            Panel(
                "Reconcile, seconds",
                "line",
                {
                    "p50": "histogram_quantile(0.5, sum by (le) (rate(orbit_operator_reconcile_seconds_bucket[5m])))",
                    "p99": "histogram_quantile(0.99, sum by (le) (rate(orbit_operator_reconcile_seconds_bucket[5m])))",
                },
                unit="s",
            ),
            Panel("Queue", "line", {"runs": "max(orbit_operator_queue_depth)"}),
            Panel("Failed passes", "line", {"per minute": "60 * sum(rate(orbit_operator_reconcile_errors_total[5m]))"}),
            Panel(
                "Since the last event",
                "line",
                {"{{pod}}": "time() - orbit_operator_last_event_timestamp_seconds"},
                unit="s",
            ),
        ),
    },
)

RUN = Dashboard(
    name="run",
    uid="orbit-run",
    title="Orbit: one run",
    variables=(
        Variable("namespace", "label_values(orbit_run_info, namespace)"),
        Variable("run", 'label_values(orbit_run_info{namespace="$namespace"}, run)'),
    ),
    num_open=2,
    rows={
        "State": (
            Panel("Step", "stat", {"step": "max(orbit_run_step{@})", "of": "max(orbit_run_step_target{@})"}),
            Panel(
                "Since the last step",
                "stat",
                {"": "time() - max(orbit_run_last_progress_timestamp_seconds{@})"},
                unit="s",
            ),
            Panel(
                "Since the last sign of life",
                "stat",
                {"": "time() - max(orbit_run_last_sign_of_life_timestamp_seconds{@})"},
                unit="s",
            ),
            Panel(
                "Since the last durable checkpoint",
                "stat",
                {"": "time() - max(orbit_run_last_checkpoint_timestamp_seconds{@})"},
                unit="s",
            ),
            Panel("Phase", "state", {"{{phase}}, {{reason}}": "orbit_run_phase{@} == 1"}),
            Panel("Attempt", "line", {"attempt": "max(orbit_run_attempt{@})"}),
            Panel("Ends of attempts", "line", {"{{class}}": "orbit_run_attempts_total{@}"}),
            Panel("GPU time", "line", {"{{kind}}": "orbit_run_gpu_seconds_total{@}"}, unit="s"),
            Panel(
                "Conditions that hold",
                "state",
                {"{{condition}}": 'orbit_run_status_condition{@, status="True"} == 1'},
                width=24,
            ),
        ),
        "Learning": (
            Panel(
                "Reward",
                "line",
                {"mean": "orbit_run_reward_mean{@}", "standard deviation": "orbit_run_reward_std{@}"},
            ),
            Panel("Parts of the reward", "line", {"{{reward}}, before its weight": "orbit_run_reward_part_mean{@}"}),
            Panel(
                "Evaluation of held-out prompts",
                "line",
                {"{{environment}}, {{statistic}}": 'orbit_run_evaluation{@, statistic=~"mean|low|high|pass"}'},
            ),
            Panel("KL from the base", "line", {"a few samples": "orbit_run_kl_base{@}", "KL term": "orbit_run_kl{@}"}),
            Panel("Loss", "line", {"loss": "orbit_run_loss{@}"}),
            Panel("Entropy", "line", {"entropy": "orbit_run_entropy{@}"}),
            Panel("Gradient norm", "line", {"before clipping": "orbit_run_grad_norm{@}"}),
            Panel("Clipped tokens", "line", {"share": "orbit_run_clip_fraction{@}"}, unit="percentunit"),
            Panel("Groups", "line", {"{{kind}}": "orbit_run_groups{@}"}),
            Panel("Learning rate", "line", {"rate": "orbit_run_learning_rate{@}"}, unit="sci"),
            Panel(
                "How rewards end",
                "stack",
                {"{{outcome}}": "sum by (outcome) (increase(orbit_run_reward_outcomes_total{@}[$__rate_interval]))"},
            ),
        ),
        "Trust": (
            Panel(
                "Trainer against engine",
                "line",
                {"{{statistic}}": "orbit_run_parity{@}"},
                text="|log-prob difference| in nats; `limit` is what `mean` is gated against.",
                width=12,
            ),
            Panel("Top-1 agreement", "line", {"share": "orbit_run_top1_agreement{@}"}, unit="percentunit"),
            Panel("Policy version", "line", {"version": "orbit_run_policy_version{@}"}),
            Panel("Staleness", "line", {"most": "orbit_run_staleness_max{@}", "mean": "orbit_run_staleness_mean{@}"}),
        ),
        "Engine": (
            Panel("Servers up", "stat", {"up": "sum(orbit_engine_up{@})", "of": "count(orbit_engine_up{@})"}),
            Panel(
                "Servers brought back",
                "stat",
                {
                    "times": "sum(orbit_engine_restarts_total{@})",
                    "adapters as files": "sum(orbit_engine_missed_adapters_total{@})",
                },
                text="And adapters that did not arrive by adapterTransport, which came as files.",
            ),
            Panel(
                "Requests",
                "line",
                {
                    "{{replica}} runs": "sglang:num_running_reqs{@} or vllm:num_requests_running{@}",
                    "{{replica}} queued": "sglang:num_queue_reqs{@} or vllm:num_requests_waiting{@}",
                },
                text="Of an attached server: of all who use it.",
            ),
            Panel(
                "Key-value cache in use",
                "line",
                {"{{replica}}": "sglang:token_usage{@} or vllm:kv_cache_usage_perc{@}"},
                unit="percentunit",
                text="Share of each server's cache that holds tokens; at 1, requests wait.",
            ),
            Panel("Memory of the engine", "line", {"{{replica}}": "orbit_engine_memory_bytes{@}"}, unit="bytes"),
            Panel(
                "Tokens sampled per second, by server",
                "line",
                {
                    "{{replica}}": "sum by (replica) (rate(sglang:generation_tokens_total{@}[$__rate_interval])"
                    " or rate(vllm:generation_tokens_total{@}[$__rate_interval]))"
                },
                text="Of an attached server: for all who use it.",
            ),
        ),
        "Speed": (
            Panel("Tokens per second", "line", {"tokens/s": "orbit_run_tokens_per_second{@}"}),
            Panel("Seconds of a step", "stack", {"{{stage}}": "orbit_run_stage_seconds{@}"}, unit="s"),
            Panel("Seconds of a step, whole", "line", {"step": "orbit_run_step_seconds{@}"}, unit="s"),
            Panel("Length of completions", "line", {"tokens": "orbit_run_response_tokens_mean{@}"}),
            Panel("Completions cut off", "line", {"share": "orbit_run_truncated_fraction{@}"}, unit="percentunit"),
            Panel(
                "Tokens sampled",
                "line",
                {
                    "trained": "60 * rate(orbit_run_tokens_total{@}[$__rate_interval])",
                    "not chosen": "60 * rate(orbit_run_tokens_unchosen_total{@}[$__rate_interval])",
                },
                text="Per minute; not chosen: in branches of episodes that none of their rollouts contains.",
            ),
        ),
        "Some runs only": (
            Panel(
                "Sources of prompts",
                "line",
                {"{{source}}, {{statistic}}": 'orbit_run_source{@, statistic=~"reward|epochs"}'},
                text="With weights in data.prompts.",
            ),
            Panel(
                "Difficulty of prompts",
                "line",
                {"{{prompts}}": "orbit_run_pass_rates{@}"},
                text="With data.difficulty: prompts whose pass rate is known, and those that are passed over.",
            ),
            Panel("Dropped tokens", "line", {"share": "orbit_run_dropped_fraction{@}"}, unit="percentunit"),
            Panel("Bound of OFT's series", "line", {"distance": "orbit_run_oft_series_error{@}"}, unit="sci"),
            Panel(
                "Samples of later steps",
                "line",
                {"waiting": "orbit_run_rollouts_waiting{@}", "unfinished": "orbit_run_rollouts_unfinished{@}"},
                text="With rollout.maxStaleness above 0, when a step was taken to be trained.",
            ),
            Panel(
                "Critic",
                "line",
                {"value loss": "orbit_run_value_loss{@}", "explained": "orbit_run_explained_variance{@}"},
                text="With algorithm.type PPO: 1 is a critic that predicted every return, 0 one that knows their mean.",
            ),
            Panel(
                "Held-out demonstrations",
                "line",
                {"loss": "orbit_run_validation_loss{@}"},
                text="With algorithm.type SFT and data.validation: nats per token of held-out answers.",
            ),
            Panel(
                "Teacher",
                "line",
                {"divergence": "orbit_run_teacher_divergence{@}"},
                text="With algorithm.teacher: what the policy's tokens are from the teacher's, in nats.",
            ),
            Panel("Routers that agree", "line", {"share": "orbit_run_router_agreement{@}"}, unit="percentunit"),
            Panel("Turns per episode", "line", {"mean": "orbit_run_turns_mean{@}"}),
            Panel(
                "Tool calls",
                "line",
                {
                    "made": "60 * rate(orbit_run_tool_calls_total{@}[$__rate_interval])",
                    "failed": "60 * rate(orbit_run_tool_errors_total{@}[$__rate_interval])",
                },
            ),
            Panel(
                "Thrown away",
                "line",
                {
                    "prompts": "60 * rate(orbit_run_prompts_cancelled_total{@}[$__rate_interval])",
                    "tokens": "60 * rate(orbit_run_tokens_cancelled_total{@}[$__rate_interval])",
                },
                text="With rollout.overSampling: cancelled stragglers and their tokens, per minute.",
            ),
        ),
    },
)

DASHBOARDS = (FLEET, RUN)


def build_dashboard(dashboard: Dashboard) -> dict[str, Any]:
    """Grafana's object."""
    told = b"".join((RunMetrics(run="").render(), *Metrics().render())).decode()
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", told, re.MULTILINE)) | ENGINE_METRICS
    return render_dashboard(dashboard, helps | {f"orbit_run_{name}": text for name, (_, text) in RUN_SERIES.items()})
