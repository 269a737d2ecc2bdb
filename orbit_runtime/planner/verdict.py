"""Whether a run may start on a machine: one answer for `orbit plan`, `orbit run` and the operator.

Belongs here: which trainer and engine this version would start, the yes, no or "unknown" that follows from their
plan, and whether a manifest's parallel sizes divide its model. Does not belong here: bytes and layouts (`plan`),
finding the facts (`cli`, the operator).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from orbit_runtime.errors import ManifestError, UnsupportedError, UsageError
from orbit_runtime.model_info.gpus import GPUCard
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner.job import Devices, Machine, build_job, device_problem, requested_machine, split_devices
from orbit_runtime.planner.layout import requested_layout
from orbit_runtime.planner.plan import Plan, division_problems, plan, size_adapter
from orbit_runtime.planner.serving import REPLICAS, TENSOR_PARALLEL, find_refusal
from orbit_runtime.planner.support import Problem
from orbit_runtime.planner.support.manifests import (
    ManifestFacts,
    check_engine,
    check_manifest,
    check_teacher_sampling,
    read_manifest,
)
from orbit_runtime.planner.support.served import served_problems
from orbit_runtime.spec.adapter import Adapter
from orbit_runtime.spec.data import Data, Prompts
from orbit_runtime.spec.rollout import Rollout
from orbit_runtime.spec.run import Metadata, Model, OrbitRun, RunSpec
from orbit_runtime.spec.training import Training

Reason = Literal["Fits", "DoesNotFit", "Unsupported", "NotInThisVersion", "ModelMismatch", "MemoryUnknown"]


@dataclass(frozen=True)
class Verdict:
    """`accepted` is None only if the machine's memory is unknown."""

    accepted: bool | None
    reason: Reason
    problem: Problem | None
    """What is wrong, its field, and what to change; None if nothing is wrong."""
    plan: Plan | None
    """None if the manifest contradicts the model, so that nothing could be planned."""

    def to_json(self) -> dict[str, Any]:
        planned = self.plan.to_json() if self.plan else {}
        problem = self.problem
        why = {"message": problem.message, "where": problem.where, "fix": problem.fix} if problem else None
        return {**planned, "accepted": self.accepted, "reason": self.reason, "problem": why}


def judge(run: OrbitRun, model: ModelFacts, machine: Machine) -> Verdict:
    """Judges a run on a machine. Pure.

    Args:
        machine: for a `Split` pod, both containers together.
    """
    try:
        made = plan_as_run(run, model, machine)
    except ManifestError as error:
        problem = Problem(error.message, error.where or "spec", error.fix or "")
        return Verdict(False, "ModelMismatch", problem, None)
    # If the run exceeds the memory of these GPUs, report that first.
    missing = find_missing(made)
    if missing is not None and not made.is_too_big:
        return Verdict(False, "NotInThisVersion", missing, made)
    if made.problems:
        first, *others = made.problems
        message = "; ".join([first.message, *(other.message for other in others)])
        reason: Reason = "Unsupported" if made.support.state == "refused" or first.is_limit else "DoesNotFit"
        return Verdict(False, reason, replace(first, message=message), made)
    return Verdict(None, "MemoryUnknown", None, made) if made.capacity is None else Verdict(True, "Fits", None, made)


def find_missing(made: Plan) -> Problem | None:
    """A part of the plan that this version of Orbit lacks."""
    support = made.support
    if support.state != "missing":
        return None
    return Problem("; ".join(support.reasons), f"spec.{support.where}", support.fix)


def check_missing(made: Plan) -> None:
    """Raises UnsupportedError (78) for what this version of Orbit lacks, whether or not it fits."""
    if (missing := find_missing(made)) is not None:
        raise missing.error()


def check_verdict(verdict: Verdict) -> None:
    """Raises UnsupportedError (78) for a refusal, or ManifestError (64) if the manifest contradicts the model."""
    if verdict.accepted is not False or verdict.problem is None:
        return
    problem = verdict.problem
    kind = ManifestError if verdict.reason == "ModelMismatch" else UnsupportedError
    raise kind(problem.message, where=problem.where, fix=problem.fix)


def plan_as_run(run: OrbitRun, model: ModelFacts, machine: Machine) -> Plan:
    """The plan of the processes that would be started.

    `Auto` is the torch trainer on one GPU if that is enough with the manifest's micro-batch; otherwise it is ranks on
    all GPUs that the trainer may use. With one device, what the manifest leaves open is lowered until it fits.
    """
    if run.spec.training.trainer == "Megatron" or machine.nodes > 1:
        return _with_device_problem(plan(run, model, machine), run, machine)
    whole = split_devices(run.spec.placement, machine.num_gpus)
    one_trainer = replace(whole, trainer=whole.trainer[:1])
    used = replace(machine, num_gpus=min(2 if whole.are_apart else 1, machine.num_gpus))
    made = plan(run, model, used, may_choose=False, devices=one_trainer)
    can_do = all(problem.fix_suffices for problem in made.problems)
    is_alone = run.spec.training.trainer == "Torch" or run.spec.adapter.type == "Full" or len(whole.trainer) <= 1
    if is_alone and made.is_too_big:
        lowered = plan(run, model, used, devices=one_trainer)
        made = made if lowered.is_too_big else lowered
    if is_alone or can_do:
        idle = () if (found := _idle(made, machine.num_gpus, whole)) is None else (found,)
        notes, cautions = (*made.notes, *idle), (*made.cautions, *idle)
        made = replace(made, machine=machine.name, notes=notes, cautions=cautions)
    else:
        made = plan(run, model, machine)
    return _with_device_problem(made, run, machine)


def plan_served(base: Model, adapter: Adapter, rollout: Rollout, model: ModelFacts, machine: Machine) -> Plan:
    """Plans servers that belong to no run. Like those of a run, each leaves free what a Torch trainer would take
    on its GPU, here one with the defaults."""
    data, reserve = Data(prompts=(Prompts(uri="builtin://addition"),)), Training(trainer="Torch", steps=1)
    spec = RunSpec(model=base, adapter=adapter, rollout=rollout, data=data, training=reserve)
    # Nothing scores its policy, so as a manifest it would be refused.
    run = OrbitRun.model_construct(metadata=Metadata(name="serve"), spec=spec)
    return plan_as_run(run, model, machine)


def check_alone(made: Plan) -> None:
    """Checks the plan of a run in three processes: all of them read `Auto` as Torch before any machine is planned for.

    Raises:
        UnsupportedError: (78) the plan of the trainer's machine is ranks.
    """
    if made.trainer == "Megatron":
        raise UnsupportedError(
            f"three processes read `Auto` as Torch, and one GPU of {made.machine} is not enough for this model",
            where="spec.training.trainer",
            fix="write Megatron for all three, or use `orbit run`",
        )


def _with_device_problem(made: Plan, run: OrbitRun, machine: Machine) -> Plan:
    why = device_problem(run.spec.placement, machine.num_gpus)
    if why is None:
        return made
    fix = f"write trainerGpus: {machine.num_gpus - 1} or less, or run it where there are more GPUs"
    return replace(made, problems=(Problem(why, "spec.placement.trainerGpus", fix), *made.problems))


def _idle(made: Plan, num_gpus: int, whole: Devices) -> str | None:
    """Names the GPUs that neither the trainer nor a server uses. A server may share the trainer's GPUs."""
    used = {*made.devices.trainer, *(gpu for gpus in made.server_devices for gpu in gpus)}
    idle = [gpu for gpu in range(num_gpus) if gpu not in used]
    if not idle:
        return None
    names = ", ".join(map(str, idle))
    told = f"{len(idle)} of {num_gpus} GPUs are idle ({names})"
    if whole.are_apart and any(gpu in whole.trainer for gpu in idle):
        return f"{told}: one is enough for the trainer; write placement.trainerGpus: 1 or training.trainer: Megatron"
    if whole.are_apart:
        return f"{told}: the engine's servers do not use them (rollout.replicas, tensorParallel)"
    return (
        f"{told}: one is enough for the trainer; lower placement.gpus, give them to the engine "
        "(rollout.engine: SGLang, replicas, tensorParallel), or write training.trainer: Megatron"
    )


TRAINER = "spec.training.parallel"
_SOME_GPU = GPUCard("GPU", 1 << 60, 0.0, (), "a card that nobody named: its memory is no matter of these sizes")
_CPU = Machine(None)
_MANY = 1 << 20
"""GPUs that servers may use if the number is unknown."""


def has_sizes(run: OrbitRun) -> bool:
    """Whether the manifest sets sizes that its model must suit."""
    return bool(run.spec.training.parallel.model_fields_set) or run.spec.rollout.tensor_parallel is not None


def check_division(made: Plan) -> None:
    """Raises UnsupportedError (78), with the plan's message, if ranks cannot divide the model like this."""
    _raise_first([each for each in made.problems if each.where.startswith(TRAINER)])


def check_servers(made: Plan) -> None:
    """Raises UnsupportedError (78), with the plan's message, if the model cannot be cut for these servers."""
    _raise_first([each for each in made.problems if each.where in (REPLICAS, TENSOR_PARALLEL)])


def check_sizes(run: OrbitRun, model: ModelFacts) -> bool:
    """Checks the sizes in the manifest on the machine that it requests. Pure.

    Returns whether that machine is known; if not, only rules that hold on every machine were checked, not the number
    of GPUs.

    Raises:
        UnsupportedError: (78) the sizes cannot divide the model, or not on these GPUs and nodes. The message is the
        plan's.
        ManifestError: (64) the manifest contradicts the model, so that nothing can be planned.
    """
    machine = _machine(run)
    if machine is not None:
        made = plan_as_run(run, model, machine)
        check_division(made)
        _raise_first([each for each in made.problems if each.where == TENSOR_PARALLEL])
        return True
    job = build_job(run, _CPU)
    _raise_first(division_problems(model, job, requested_layout(job.spec.training.parallel), _CPU))
    refusals = [find_refusal(model, job, num_gpus) for num_gpus in (_MANY, 0)]
    # Some sizes are only refused on a CPU, and some only on GPUs.
    if refusals[0] is not None and refusals[1] is not None:
        raise refusals[0]
    return False


def needs_model(run: OrbitRun) -> bool:
    """Whether rows about a served adapter, which take the model's headers, apply on every machine."""
    return run.spec.rollout.engine in ("SGLang", "OpenAI") and run.spec.algorithm.type != "SFT"


def check_support(run: OrbitRun, model: ModelFacts | None) -> None:
    """Checks what is supported on no machine that the manifest may run on. Pure.

    Args:
        model: None if its headers are not known here.

    Raises:
        UnsupportedError: (78) with the plan's message.
        ManifestError: (64) the manifest contradicts the model, as `plan` says it.
    """
    spec = run.spec
    if model is not None:
        size_adapter(build_job(run, _machine(run) or _CPU), model)
    check_engine(spec)
    check_teacher_sampling(spec)
    check_manifest(ManifestFacts(spec) if model is None else read_manifest(spec, model, spec.training.trainer))
    if model is not None and needs_model(run):
        machine = _machine(run) or _CPU
        _raise_first([*served_problems(model, build_job(run, machine), machine)])


def _machine(run: OrbitRun) -> Machine | None:
    """The machine that the manifest names; None if unknown. For several nodes the number of GPUs is enough. For one
    node, `gpus` is what a cluster's pod would have; elsewhere a run takes the machine as it is, even with an unknown
    card."""
    placement = run.spec.placement
    try:
        named = requested_machine(run)
    except UsageError:
        named = None
    if named is not None or placement.nodes == 1:
        return named
    return Machine(_SOME_GPU, placement.gpus * placement.nodes, nodes=placement.nodes)


def _raise_first(problems: list[Problem]) -> None:
    for problem in problems:
        raise problem.error()
