"""May this run start on this machine? One answer for `orbit plan`, `orbit run` and the operator.

Belongs here: which trainer and engine this version would start, and the yes, the no or the "not known" that follows
from their plan. Does not belong here: bytes and layouts (`plan`), finding the facts (`cli`, the operator).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from orbit_runtime.errors import ManifestError, UnsupportedError
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner.job import Machine
from orbit_runtime.planner.plan import Plan, Problem, plan
from orbit_runtime.spec import OrbitRun

Reason = Literal["Fits", "DoesNotFit", "Unsupported", "NotInThisVersion", "ModelMismatch", "MemoryUnknown"]


@dataclass(frozen=True)
class Verdict:
    """`accepted` is None only where a fact is missing: the memory of the machine."""

    accepted: bool | None
    reason: Reason
    problem: Problem | None
    """What is wrong, its field, and what to change; None where nothing is."""
    plan: Plan | None
    """None where the manifest contradicts the model, so that nothing could be planned."""

    def to_json(self) -> dict[str, Any]:
        planned = self.plan.to_json() if self.plan else {}
        problem = self.problem
        why = {"message": problem.message, "where": problem.where, "fix": problem.fix} if problem else None
        return {**planned, "accepted": self.accepted, "reason": self.reason, "problem": why}


def judge(run: OrbitRun, model: ModelFacts, machine: Machine) -> Verdict:
    """Pure.

    Args:
        machine: of a `Split` pod the whole, both containers.
    """
    try:
        made = plan_as_run(run, model, machine)
    except ManifestError as error:
        problem = Problem(error.message, error.where or "spec", error.fix or "")
        return Verdict(False, "ModelMismatch", problem, None)
    # Where no GPUs like these would hold it, that is the first thing to say.
    if made.support.state == "missing" and not made.is_too_big:
        problem = Problem("; ".join(made.support.reasons), f"spec.{made.support.where}", made.support.fix)
        return Verdict(False, "NotInThisVersion", problem, made)
    if made.problems:
        first, *others = made.problems
        message = "; ".join([first.message, *(other.message for other in others)])
        reason: Reason = "Unsupported" if made.support.state == "refused" else "DoesNotFit"
        return Verdict(False, reason, replace(first, message=message), made)
    if made.capacity is None:
        return Verdict(None, "MemoryUnknown", None, made)
    return Verdict(True, "Fits", None, made)


def check_verdict(verdict: Verdict) -> None:
    """Raises UnsupportedError (78), or ManifestError (64) where the manifest contradicts the model, for a no."""
    if verdict.accepted is not False or verdict.problem is None:
        return
    problem = verdict.problem
    kind = ManifestError if verdict.reason == "ModelMismatch" else UnsupportedError
    raise kind(problem.message, where=problem.where, fix=problem.fix)


def plan_as_run(run: OrbitRun, model: ModelFacts, machine: Machine) -> Plan:
    """The plan of what would be started; where one GPU is not enough, of the trainer that it would take.

    `Auto` is the torch trainer, which works on one GPU and takes the micro-batch that the manifest says.
    """
    parts = 2 if run.spec.placement.layout == "Split" and machine.num_gpus > 1 else 1
    asked, trainers = run.spec.training.trainer, machine.num_gpus // parts

    used = replace(machine, num_gpus=min(parts, machine.num_gpus))
    one = plan(run, model, used, may_choose=False, gpus_for_servers=trainers or None)
    can_do = all(problem.fix_suffices for problem in one.problems)
    if asked == "Torch" or trainers <= 1 or can_do:
        idle = _idle(one, machine.num_gpus, parts)
        return replace(one, machine=machine.name, notes=(*one.notes, *([idle] if idle else [])))
    return plan(run, model, machine)


def _idle(one: Plan, num_gpus: int, parts: int) -> str | None:
    """GPUs that neither the trainer nor a server uses. A server may stand on the trainer's."""
    engine = one.servers * one.server_gpus
    used = 1 + engine if parts == 2 else max(1, engine)
    if num_gpus <= used:
        return None
    where = "the trainer takes one GPU of its half" if parts == 2 else "this version trains on one GPU"
    return (
        f"{num_gpus - used} of {num_gpus} GPUs stand idle: {where}; lower placement.gpus, or give them to the engine "
        "(rollout.engine: SGLang, replicas, tensorParallel)"
    )
