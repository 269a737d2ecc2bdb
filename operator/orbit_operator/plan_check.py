"""What the planner says of a manifest before any GPU is taken: the condition `PlanAccepted`.

Belongs here: asking the planner, with what is known without reading a store; remembering its answers.
Does not belong here: any arithmetic (`orbit_runtime.planner`), what follows from an answer (`ending`).

Where too little is known the answer is `Unknown`: the pod then plans first, and refuses with exit code 78.
"""

from __future__ import annotations

from orbit_operator.manifests.source import RunSource
from orbit_runtime.errors import ManifestError, ModelError, OrbitError, UsageError
from orbit_runtime.model_info.builtin_models import builtin_folder
from orbit_runtime.model_info.cards import find_card_facts
from orbit_runtime.model_info.checkpoint import folder_facts
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner import check_fits, plan
from orbit_runtime.planner.asked import asked_machine
from orbit_runtime.spec import OrbitRun

Answer = tuple[str, str, str]
"""Status, reason and message of the condition."""
GIB = 2**30
UNKNOWN = "PlannerUnavailable"
REMEMBERED = 1000


class PlanCheck:
    """One answer per version of a run: planning takes milliseconds, and a run is looked at many times."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, int], Answer] = {}

    def ask(self, source: RunSource, generation: int) -> Answer:
        key = (source.uid, generation)
        if key not in self._answers:
            if len(self._answers) >= REMEMBERED:
                del self._answers[next(iter(self._answers))]
            self._answers[key] = check_plan(source.manifest)
        return self._answers[key]


def check_plan(run: OrbitRun) -> Answer:
    """Whether the run fits the GPUs that it asks for, by the function that `orbit plan` calls."""
    try:
        model, machine = find_facts(run), asked_machine(run)
    except (ModelError, UsageError) as error:
        return "Unknown", UNKNOWN, f"{error.message}; the pod checks what fits before it trains"
    if model is None or machine is None:
        missing = f"the files of {run.spec.model.uri}" if model is None else "spec.placement.gpuProduct"
        return "Unknown", UNKNOWN, f"{missing} would tell more; the pod checks what fits before it trains"
    try:
        made = plan(run, model, machine)
        check_fits(made)
    except ManifestError as error:
        return "False", "ValidationFailed", _words(error)
    except OrbitError as error:
        return "False", "Unsupported", _words(error)
    fullest = max(made.phases, key=made.total)
    of = f" of {made.capacity / GIB:.1f}" if made.capacity else ""
    return "True", "Fits", f"{made.machine}: at most {made.total(fullest) / GIB:.1f}{of} GiB each, in phase {fullest}"


def find_facts(run: OrbitRun) -> ModelFacts | None:
    """Of a shipped model or a shipped card; None where files in a store or on a node would have to be read."""
    scheme, separator, rest = run.spec.model.uri.partition("://")
    if scheme == "builtin" and separator:
        return folder_facts(builtin_folder(rest, run.spec.model.precision))
    return find_card_facts(run.spec.model.uri)


def _words(error: OrbitError) -> str:
    where = f"{error.where}: " if error.where else ""
    fix = f"; {error.fix}" if error.fix else ""
    return f"{where}{error.message}{fix}"[:900]
