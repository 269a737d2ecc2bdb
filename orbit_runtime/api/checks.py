"""Checks before a run: whether the packages are installed, and whether the model fits on the machine.

Belongs here: finding the facts and calling `planner`. Does not belong here: its arithmetic, printing (`cli`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orbit_runtime.api.machine import this_machine
from orbit_runtime.errors import ModelError, OrbitError, StorageError, UnsupportedError
from orbit_runtime.spec.storage import STORES
from orbit_runtime.storage.cache import Cache, default_cache

if TYPE_CHECKING:
    from orbit_runtime.model_info.weights import ModelFacts
    from orbit_runtime.planner import Machine
    from orbit_runtime.planner.layout import Layout
    from orbit_runtime.spec import OrbitRun

NEEDED_TO_TRAIN = ("torch", "transformers", "safetensors", "tokenizers", "numpy")


def check_can_train() -> None:
    """Raises UnsupportedError (78) if the packages needed for training are not installed."""
    missing = [name for name in NEEDED_TO_TRAIN if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"training needs packages that are not installed here: {', '.join(missing)}",
            fix="pip install 'orbit-rl[train]'",
        )


def check_before_run(run: OrbitRun, folder: Path, notice: Callable[[str], None] | None = None) -> list[str]:
    """Checks whether this run may start on this machine, before anything heavy is loaded: the verdict of `orbit plan`.

    Returns what the user should know even though the run may start (`Plan.cautions`).

    A model whose facts cannot be found is left to the loaders, which report what is wrong with it in more detail.

    Args:
        notice: called with a message when a request is tried again; None prints the message.

    Raises:
        UnsupportedError: (78) it does not fit, or nothing in this version can run it.
        ManifestError: (64) the precision is not the checkpoint's, or an adapter suits no layer.
        ModelError: (66) the model's folder on this machine does not exist.
        StorageError: (74) the hub or store does not answer; the loaders would only wait for it again.
    """
    from orbit_runtime.model_info.settings import check_folder
    from orbit_runtime.planner import check_verdict, judge

    local = local_model(run, folder)
    if local is not None:
        check_folder(local)
    try:
        model = find_facts(run, folder, notice or _print_notice)
    except StorageError:
        raise
    except OrbitError:
        return []
    verdict = judge(run, model, this_machine(run.spec.placement))
    check_verdict(verdict)
    return [*verdict.plan.cautions] if verdict.plan else []


MEASURED_STEPS = 3
"""Steps from which a step's time is known: much is used for the first time in the first."""


def keep_pace(run: OrbitRun, folder: Path, start: float, step: float) -> None:
    """Keeps the seconds of start and of a step, for later runs of this manifest on this machine."""
    Cache(default_cache(os.environ)).save_pace(_pace_key(run, folder, this_machine(run.spec.placement)), start, step)


def tell_pace(run: OrbitRun, folder: Path, machine: Machine) -> str:
    """How long the run takes there, as `orbit try` or an earlier run of the same manifest measured it."""
    from orbit_runtime.observability.progress import format_seconds

    steps = run.spec.training.steps
    pace = Cache(default_cache(os.environ)).load_pace(_pace_key(run, folder, machine))
    if pace is None:
        return f"{steps} steps; how long they take is unknown until {MEASURED_STEPS} were measured, as `orbit try` does"
    whole, start = (format_seconds(each) for each in (pace[0] + steps * pace[1], pace[0]))
    return f"{steps} steps, about {whole}, {start} of it start; evaluations not counted"


def _pace_key(run: OrbitRun, folder: Path, machine: Machine) -> str:
    """Digest of what the time of a step depends on, as far as a manifest and a machine say it."""
    from orbit_runtime.spec import MachineFacts, resolve

    resolved = resolve(run, MachineFacts(has_cuda=machine.gpu is not None, num_gpus=machine.num_gpus), folder=folder)
    processes = resolved.run.spec.model.uri, resolved.trainer, resolved.engine, machine.name, os.cpu_count()
    return hashlib.sha256(f"{resolved.identity} {processes}".encode()).hexdigest()


def local_model(run: OrbitRun, folder: Path) -> Path | None:
    """The model's folder if its address is on this machine, otherwise None; a relative path starts at `folder`."""
    scheme, separator, rest = run.spec.model.uri.partition("://")
    if separator:
        return Path(rest) if scheme == "file" else None
    from orbit_runtime.spec.resolve import absolute_uri

    return Path(absolute_uri(run.spec.model.uri, folder))


def find_server_gpus(run: OrbitRun, model: ModelFacts | None) -> int | None:
    """GPUs (on a CPU: processes) of each of the run's SGLang servers on this machine; None if unknown.

    Args:
        model: None if not known yet.

    Raises:
        UnsupportedError: (78) the model cannot be divided that way, or there are too few GPUs.
    """
    from orbit_runtime.planner.job import build_job
    from orbit_runtime.planner.serving import check_servers

    job = build_job(run, this_machine(run.spec.placement))
    if job.engine != "SGLang":
        return None
    return run.spec.rollout.tensor_parallel if model is None else check_servers(model, job, len(job.devices.engine))


def find_ranks(run: OrbitRun, model: ModelFacts | None) -> Layout | None:
    """The division of the model among a trainer's processes on this machine; None if one process trains.

    Args:
        model: None if not known yet.

    Raises:
        UnsupportedError: (78) the model cannot be divided by these sizes, or not by this version.
    """
    from orbit_runtime.planner.layout import requested_layout
    from orbit_runtime.planner.verdict import check_division, plan_as_run

    machine = this_machine(run.spec.placement)
    if model is None:
        return requested_layout(run.spec.training.parallel) if run.spec.training.trainer == "Megatron" else None
    made = plan_as_run(run, model, machine)
    check_division(made)
    return made.layout if made.trainer == "Megatron" else None


def _print_notice(message: str) -> None:
    print(message, file=sys.stderr)


def find_facts(run: OrbitRun, folder: Path, notice: Callable[[str], None] = _print_notice) -> ModelFacts:
    """Facts of the manifest's model, from its headers (local, in a store or on a hub) or from a shipped card.

    Args:
        folder: the manifest's folder, where a relative path of the model starts.

    Raises:
        ModelError: there are no facts, or the files are broken.
    """
    facts = local_facts(run, folder)
    if facts is not None:
        return facts
    uri = run.spec.model.uri
    scheme = uri.partition("://")[0]
    if scheme in STORES:
        from orbit_runtime.model_info.remote_checkpoint import store_facts
        from orbit_runtime.storage import open_store

        return store_facts(open_store(uri, writable=False))
    if scheme == "hf":
        return _hub_facts(uri, notice)
    from orbit_runtime.model_info.cards import repositories

    raise ModelError(
        f"nothing is known here about {uri}",
        where="spec.model.uri",
        fix="plan where the files are, with their path, an s3:// or an hf:// address; shipped cards: "
        + ", ".join(sorted(repositories())),
    )


def local_facts(run: OrbitRun, folder: Path) -> ModelFacts | None:
    """Like `find_facts`, for shipped models, cards and folders on this machine; None if the model is elsewhere."""
    uri = run.spec.model.uri
    scheme, separator, rest = uri.partition("://")
    if scheme == "builtin" and separator:
        from orbit_runtime.model_info.builtin_models import builtin_folder
        from orbit_runtime.model_info.checkpoint import folder_facts

        # Users know it by its address; the folder of each precision is named after the precision.
        return replace(folder_facts(builtin_folder(rest, run.spec.model.precision)), name=uri)
    path = local_model(run, folder)
    if path is not None:
        from orbit_runtime.model_info.checkpoint import folder_facts

        return folder_facts(path)
    if scheme in STORES:
        return None
    from orbit_runtime.model_info.cards import find_card_facts

    return find_card_facts(uri)


def _hub_facts(uri: str, notice: Callable[[str], None]) -> ModelFacts:
    """Facts from range reads of the headers: nothing is downloaded."""
    from orbit_runtime.model_info.remote_checkpoint import store_facts
    from orbit_runtime.spec.hub_address import MODEL_FORM, is_model_address
    from orbit_runtime.storage.cache import RetryPolicy
    from orbit_runtime.storage.hub import Hub, read_access
    from orbit_runtime.storage.opening import START_DEADLINE_SECONDS, read_deadline

    def missing(message: str, *, fix: str | None = None) -> OrbitError:
        return ModelError(f"{uri}: {message}", where="spec.model.uri", fix=fix or "correct spec.model.uri")

    if not is_model_address(uri):
        raise missing("this is not a model's address on the hub", fix=f"write {MODEL_FORM}")
    deadline = min(START_DEADLINE_SECONDS, read_deadline(os.environ))
    with Hub(uri, read_access(os.environ), RetryPolicy(deadline, notice=notice), missing) as hub:
        return store_facts(hub)
