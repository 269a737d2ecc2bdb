"""`orbit eval`: evaluates models on the prompts of a manifest or a run, and reports the scores.

Belongs here: which models are meant, the folder, printing. Does not belong here: asking (`evaluation`), engines
(`loop`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple
from urllib.parse import urlsplit

import typer

from orbit_runtime.cli.output import AsJson, Overrides, complete_runs, format_json
from orbit_runtime.errors import EXIT_DONE, CredentialsError, RewardsFailingError, StoppedOnRequest, UsageError
from orbit_runtime.observability.logs import build_console

if TYPE_CHECKING:
    from rich.console import Console

    from orbit_runtime.evaluation.evaluate import Subject
    from orbit_runtime.evaluation.journal import Journal
    from orbit_runtime.evaluation.scores import Estimate
    from orbit_runtime.evaluation.summary import Summary
    from orbit_runtime.evaluation.tasks import EvalTask
    from orbit_runtime.observability.progress import Progress
    from orbit_runtime.spec import OrbitRun


class Models(NamedTuple):
    """The models to evaluate, from the command line."""

    weights_dir: str | None = None
    steps: str | None = None
    base: bool = True
    adapter: str | None = None
    base_url: str | None = None
    api_key_env: str | None = None
    model: str | None = None
    against: str | None = None
    """The model that the others are compared with, of these or those in the folder; None: the first."""


def evaluate(
    target: Annotated[
        str,
        typer.Argument(metavar="FILE|DIR", help="A manifest, a run folder or RUN@best.", autocompletion=complete_runs),
    ],
    out: Annotated[
        str | None, typer.Option(metavar="URI", help="Where to store samples and report. By default, next to the run.")
    ] = None,
    weights_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="The run folder whose saved adapters are measured.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="N,N", help="Only the adapters of these steps. [all that are saved]")
    ] = None,
    no_eval_base: Annotated[bool, typer.Option("--no-eval-base", help="Leave out the bare base.")] = False,
    adapter: Annotated[str | None, typer.Option(metavar="DIR", help="One adapter, in PEFT's format.")] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="An OpenAI-compatible API, such as http://127.0.0.1:8000/v1.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The API's model.")] = None,
    api_key_env: Annotated[str | None, typer.Option(metavar="VAR", help="Variable that holds the API's key.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model with which others are compared. [the first]")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Measure models on prompts. The base, a run's checkpoints, or an API; continues after an interruption.

    \f
    Returns 0, or 86 where more samples have no score than `environment.failureLimit` allows; all are kept.

    Raises:
        OrbitError: something is missing, or a model, an environment or the store ended it. What was answered is kept.
    """
    target, steps = _step_of(target, steps)
    if weights_dir is not None:
        weights_dir, steps = _step_of(weights_dir, steps)
    models = Models(weights_dir, steps, not no_eval_base, adapter, base_url, api_key_env, model, against)
    _check_models(models)
    run, folder, ran = _read(target, models, overrides or [])
    weights = ran if models.adapter is None else None
    if models.steps is not None and weights is None:
        raise UsageError("of which run?", where="--steps", fix="add --weights-dir, or name a run's folder")
    if not models.base and (weights, models.adapter, models.base_url) == (None, None, None):
        raise UsageError(
            "nothing is left to measure",
            where="--no-eval-base",
            fix="name a run's folder, --weights-dir or --adapter, or leave the option out",
        )
    uri = out or f"{weights or run.spec.storage.uri.rstrip('/') + '/' + run.name}-eval"
    if models.base_url is None:
        from orbit_runtime.api.checks import check_can_train

        check_can_train()
    from orbit_runtime.observability.progress import build_progress

    # On standard error also for --json: the result is one object.
    progress = build_progress(run.name, log_format=run.spec.observability.log_format)
    try:
        summary, kept_at = _measure(run, folder, ran, models, uri, progress)
    finally:
        progress.close()
    if as_json:
        print(format_json({"uri": kept_at, **summary.to_json()}))
    else:
        print_summary(summary)
        print(f"page     {kept_at}/report.html")
    _check_failed(run, summary)
    return EXIT_DONE


def _measure(
    run: OrbitRun, folder: Path, ran: str | None, models: Models, uri: str, progress: Progress
) -> tuple[Summary, str]:
    """Asks for what is missing; returns the summary of everything in the evaluation's folder, and its address."""
    from orbit_runtime.cli.bars import evaluation_bar
    from orbit_runtime.evaluation.evaluate import ask_all
    from orbit_runtime.evaluation.journal import Journal, read_settings, save_settings
    from orbit_runtime.evaluation.tasks import evaluation_settings, naming_fields, open_task, task_specs
    from orbit_runtime.loop.own_code import newest_path
    from orbit_runtime.spec import MachineFacts, resolve
    from orbit_runtime.storage import claim_execution, open_store

    run = resolve(run, MachineFacts(has_cuda=False, num_gpus=0), folder=folder).run
    store, ended = open_store(uri), "failed"
    with ExitStack() as closing:
        asked, folders = evaluation_settings(run.spec), [str(folder), str(Path.cwd())]
        tasks = []
        progress.stage("reading prompts, starting rewards")
        if ran is not None:
            folders += newest_path(open_store(ran, writable=False), closing)
        for name, spec in task_specs(run.name, run.spec).items():
            with naming_fields(run.spec, name):
                tasks.append(open_task(name, spec, asked, folders, closing))
        subjects = (
            _api_subjects(models, tasks, run) if models.base_url else _local_subjects(models, run, tasks, ran, progress)
        )
        _check_against(
            models.against, {*(read_settings(store) or {"subjects": ()})["subjects"], *(each.name for each in subjects)}
        )
        execution = claim_execution(store, run_name=f"{run.name}-eval")
        closing.callback(lambda: execution.release(ended))
        execution.start_heartbeat()
        save_settings(
            store,
            {task.name: task.to_json() for task in tasks},
            {subject.name: subject.to_json() for subject in subjects},
        )
        progress.close()  # a terminal shows one display at a time
        with Journal(store, execution) as journal, evaluation_bar(progress.note) as show:
            try:
                ask_all(subjects, tasks, journal, concurrency=run.spec.evaluation.concurrency, show=show)
            except StoppedOnRequest:
                ended = "stopped"
                raise
            journal.gather()
        summary = _finish(journal, run, uri, models.against)
        ended = "done"
    return summary, store.uri


def _check_failed(run: OrbitRun, summary: Summary) -> None:
    from orbit_runtime.evaluation.tasks import task_specs

    limit = max(spec.environment.failure_limit for spec in task_specs(run.name, run.spec).values())
    if summary.failed_share > limit:
        reasons = [*dict.fromkeys(reason for score in summary.scores for reason in score.reasons)]
        raise RewardsFailingError(
            f"{summary.failed_share:.0%} of the samples have no score, the limit is {limit:.0%}: "
            + "; ".join(reasons[:3]),
            where="spec.environment.failureLimit",
            fix="repeat the command: it requests only the samples that were not answered",
        )


def _check_models(models: Models) -> None:
    local = {"--weights-dir": models.weights_dir, "--steps": models.steps, "--adapter": models.adapter}
    given = [name for name, value in local.items() if value is not None]
    if models.base_url is not None and given:
        raise UsageError("a model behind an API is not a checkpoint", where=given[0], fix="remove it, or --base-url")
    if models.adapter is not None and models.weights_dir is not None:
        raise UsageError("this is one adapter of its own", where="--adapter", fix="remove it, or --weights-dir")
    if (models.base_url is None) != (models.model is None):
        here, lacking = ("--base-url", "--model") if models.model is None else ("--model", "--base-url")
        raise UsageError(f"{here} needs {lacking}", where=here, fix=f"add {lacking}")
    if models.api_key_env is not None and models.base_url is None:
        raise UsageError("--api-key-env needs --base-url", where="--api-key-env", fix="add --base-url and --model")
    if models.base_url is not None and not _is_address(models.base_url):
        raise UsageError(
            f"{models.base_url!r} is not an address", where="--base-url", fix="write e.g. http://127.0.0.1:8000/v1"
        )
    _steps(models.steps)


def _check_against(name: str | None, known: set[str]) -> None:
    if name is not None and name not in known:
        raise UsageError(
            f"no model {name!r} is measured here", where="--against", fix=f"there are: {', '.join(sorted(known))}"
        )


def _is_address(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False


def _step_of(address: str, steps: str | None) -> tuple[str, str | None]:
    """The run folder of an address such as `RUN@best`, and the step that it names; else both as they are."""
    from orbit_runtime.checkpoints.adapter_folder import adapter_address, split_address

    run, named = split_address(address)
    if named is None or (found := adapter_address(address)) is None:
        return run, steps
    place, why = found
    print(f"{place} is {why}", file=sys.stderr)
    return run, place.rpartition("policy-v")[2]


def _steps(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        steps = [int(each) for each in text.split(",")]
    except ValueError:
        steps = [-1]
    if min(steps) < 0:
        raise UsageError(f"{text!r} are not steps", where="--steps", fix="write numbers such as 10,20,30")
    return steps


def _read(target: str, models: Models, overrides: Sequence[str]) -> tuple[OrbitRun, Path, str | None]:
    """The run, what its relative paths start from, and the run folder that is meant."""
    import json

    from orbit_runtime.spec import load_manifest, parse_manifest
    from orbit_runtime.spec.run import upgrade_manifest
    from orbit_runtime.storage import NotFound, open_store

    if "://" not in target and not Path(target).is_dir():
        path = Path(target)
        weights = models.weights_dir
        return load_manifest(path, overrides), path.resolve().parent, weights.rstrip("/") if weights else None
    store = open_store(target, writable=False)
    try:
        content = json.loads(store.get("run.json"))
        text = json.dumps(upgrade_manifest(content["resolved"]))
    except NotFound:
        raise UsageError(
            "there is no run here", where=store.uri, fix="name a manifest, or the folder of a run"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError("not a run's run.json", where=f"{store.uri}/run.json", fix="name another folder") from None
    run = parse_manifest(text, name=f"{store.uri}/run.json", overrides=overrides)
    return run, Path.cwd(), (models.weights_dir or target).rstrip("/")


def _api_subjects(models: Models, tasks: Sequence[EvalTask], run: OrbitRun) -> Sequence[Subject]:
    from orbit_runtime.evaluation.api_model import ApiModel, Conversations, check_api_sampling
    from orbit_runtime.evaluation.evaluate import ApiSubject

    for task in tasks:
        check_api_sampling(task.sampling)
    key = os.environ.get(models.api_key_env) if models.api_key_env else None
    if models.api_key_env and not key:
        raise CredentialsError(
            f"the environment variable {models.api_key_env} is not set",
            where="--api-key-env",
            fix="set it to the API's key, or leave the option out if none is needed",
        )
    assert models.base_url is not None
    assert models.model is not None
    return [ApiSubject(ApiModel(models.base_url, models.model, key), Conversations())]


def _local_subjects(
    models: Models, run: OrbitRun, tasks: Sequence[EvalTask], ran: str | None, progress: Progress
) -> Sequence[Subject]:
    progress.stage("importing torch")
    from orbit_runtime.checkpoints.adapter_folder import NamedAdapter, adapter_address, saved_steps
    from orbit_runtime.loop.evaluate import open_models
    from orbit_runtime.planner.support.manifests import check_adapted
    from orbit_runtime.storage import open_store, read_run_file

    check_adapted(run.spec)
    kept = []
    if models.adapter is not None:
        place, _ = adapter_address(models.adapter) or (models.adapter, "")
        kept = [NamedAdapter(Path(place.rstrip("/")).name, place)]
        # A manifest has no first start, whose date templates take; the run that keeps the adapter has one.
        ran = ran or place.rpartition("/adapters/")[0]
    elif ran is not None:
        from_elsewhere = getattr(run.spec.adapter, "init_from", None) is not None
        kept = saved_steps(open_store(ran, writable=False), _steps(models.steps), first=from_elsewhere)
    started = (read_run_file(open_store(ran, writable=False)) or {}).get("started") if ran else None
    base = models.base or not kept
    progress.stage("loading the model")
    return open_models(run, tasks, kept, progress.note, base=base, started=started)


def _finish(journal: Journal, run: OrbitRun, uri: str, against: str | None) -> Summary:
    import json

    from orbit_runtime.evaluation.page import render_evaluation
    from orbit_runtime.evaluation.summary import Prices, build_summary
    from orbit_runtime.storage import open_store

    evaluation = run.spec.evaluation
    prices = Prices(evaluation.prompt_price, evaluation.completion_price)
    summary = build_summary(journal.samples, pass_at=evaluation.pass_at, prices=prices, against=against)
    store = open_store(uri)
    store.put("summary.json", json.dumps(summary.to_json(), indent=1).encode())
    store.put("report.html", render_evaluation(f"Evaluation of {run.name}", summary, journal.samples).encode())
    return summary


def print_summary(summary: Summary) -> None:
    """Scores, then each model against one."""
    from rich.table import Table

    console = _console()
    table = Table(box=None, pad_edge=False)
    ks = sorted({k for score in summary.scores for k in score.passes})
    for name in ("environment", "model"):
        table.add_column(name, no_wrap=True)
    for name in ("avg@k", *(f"pass@{k}" for k in ks), "prompts", "no score", "tokens"):
        table.add_column(name, justify="right")
    has_cost = any(score.cost is not None for score in summary.scores)
    if has_cost:
        table.add_column("cost", justify="right")
    for score in summary.scores:
        table.add_row(
            score.environment,
            score.subject,
            _interval(score.average),
            *(_interval(score.passes.get(k)) for k in ks),
            str(score.average.prompts),
            str(score.failed),
            str(score.prompt_tokens + score.completion_tokens),
            *([f"{score.cost:.4f}" if score.cost is not None else "-"] if has_cost else []),
        )
    console.print(table)
    for each in summary.comparisons:
        console.print(
            f"{each.environment}: {each.second} - {each.first}: {_interval(each.paired.difference, '+.3f')}, "
            f"better on {each.paired.better} of {each.paired.difference.prompts} prompts, worse on "
            f"{each.paired.worse}: {each.paired.verdict}",
            highlight=False,
        )


def _interval(found: Estimate | None, spec: str = ".3f") -> str:
    if found is None or found.mean is None:
        return "-"
    if found.low is None or found.high is None:
        return format(found.mean, spec)
    return f"{found.mean:{spec}} ({found.low:{spec}} to {found.high:{spec}})"


def _console() -> Console:
    """The console; if it is no terminal, lines are not broken."""
    return build_console() if sys.stdout.isatty() else build_console(width=250)
