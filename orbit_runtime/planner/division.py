"""Whether the parallel sizes in a manifest divide its model: one answer for `orbit plan`, `validate` and a dry run.

Belongs here: what can be checked for which machine. Does not belong here: the rules (`layout`, `serving`), memory.
"""

from __future__ import annotations

from orbit_runtime.errors import UnsupportedError, UsageError
from orbit_runtime.model_info.gpus import GPUCard
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner.asked import asked_machine
from orbit_runtime.planner.job import Machine, build_job
from orbit_runtime.planner.layout import asked_layout
from orbit_runtime.planner.plan import Plan, division_problems
from orbit_runtime.planner.problem import Problem
from orbit_runtime.planner.serving import FIELD, find_refusal
from orbit_runtime.planner.verdict import plan_as_run
from orbit_runtime.spec import OrbitRun

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
        _raise_first([each for each in made.problems if each.where == FIELD])
        return True
    job = build_job(run, _CPU)
    _raise_first(division_problems(model, job, asked_layout(job.asked), _CPU))
    refusals = [find_refusal(model, job, num_gpus) for num_gpus in (_MANY, 0)]
    # Some sizes are only refused on a CPU, and some only on GPUs.
    if refusals[0] is not None and refusals[1] is not None:
        raise refusals[0]
    return False


def _machine(run: OrbitRun) -> Machine | None:
    """The machine that the manifest names; None if unknown. For several nodes the number of GPUs is enough. For one
    node, `gpus` is what a cluster's pod would have; elsewhere a run takes the machine as it is, even with an unknown
    card."""
    placement = run.spec.placement
    try:
        named = asked_machine(run)
    except UsageError:
        named = None
    if named is not None or placement.nodes == 1:
        return named
    return Machine(_SOME_GPU, placement.gpus * placement.nodes, nodes=placement.nodes)


def _raise_first(problems: list[Problem]) -> None:
    for problem in problems[:1]:
        raise UnsupportedError(problem.message, where=problem.where, fix=problem.fix)
