"""The planner's verdict on a manifest before any GPU is taken: the condition `PlanAccepted`.

Belongs here: facts that need neither the network nor a model's files, and the planner's answer in one line.
Does not belong here: the arithmetic (`orbit_runtime.planner`), or the consequences of a refusal (`ending`).
"""

from __future__ import annotations

from orbit_runtime.errors import OrbitError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.cards import find_card_facts
from orbit_runtime.model_info.checkpoint import folder_facts
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner import Verdict as Judged
from orbit_runtime.planner import judge
from orbit_runtime.planner.job import asked_machine
from orbit_runtime.spec import OrbitRun

Verdict = tuple[str, str, str]
"""Status, reason and message of `PlanAccepted`."""
UNREAD: Verdict = ("Unknown", "PlannerUnavailable", "")
BUILTIN = "builtin://"
GIB = 2**30


def check_plan(run: OrbitRun) -> Verdict:
    """A refusal is final: no pod is created. If a fact is missing, the pod plans, and refuses with exit code 78."""
    try:
        machine = asked_machine(run)
        if machine is None:
            return _unknown("placement.gpuProduct names no GPU; the pod itself checks what fits before it trains")
        if machine.gpu is None and machine.host_bytes is None:
            return _unknown("placement.resources.memory is not set; the pod itself checks what fits before it trains")
        model = find_model(run)
    except OrbitError as error:
        return _unknown(_sentence(error.message, error.where, error.fix))
    if model is None:
        return _unknown(f"no facts about {run.spec.model.uri} are shipped; the pod itself checks what fits")
    return _sentences(judge(run, model, machine))


def find_model(run: OrbitRun) -> ModelFacts | None:
    """The model's facts, from what is shipped with the operator alone."""
    uri = run.spec.model.uri
    if uri.startswith(BUILTIN):
        return folder_facts(builtin_folder(uri.removeprefix(BUILTIN), run.spec.model.precision))
    return find_card_facts(uri)


def _sentences(found: Judged) -> Verdict:
    if found.problem is not None:
        return "False", found.reason, _sentence(found.problem.message, found.problem.where, found.problem.fix)
    made = found.plan
    assert made is not None, "whatever is not refused was planned"
    assert made.capacity is not None, "asked with a machine whose memory is known"
    device = made.machine.split(" x ")[-1]
    used, there = made.total(made.binding) / GIB, made.capacity / GIB
    text = f"{used:.1f} GiB of {device} in phase {made.binding}, {there:.1f} are available"
    return "True", "Fits", "; ".join([text, *made.notes])[:1024]


def _unknown(why: str) -> Verdict:
    return "Unknown", "PlannerUnavailable", why


def _sentence(message: str, where: str | None, fix: str | None) -> str:
    head = f"{where}: {message}" if where else message
    return (f"{head}; {fix}" if fix else head)[:1024]
