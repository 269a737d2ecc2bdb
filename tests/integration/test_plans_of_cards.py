"""What a plan says of published models, their builders of flags accept: by shipped cards, which hold no tensor."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from orbit_runtime.adapters.config import InjectReport
from orbit_runtime.model_info.cards import card_facts, repositories
from orbit_runtime.model_info.weights import ModelFacts
from orbit_runtime.planner import judge
from orbit_runtime.planner.adapter_size import LEFT_OUT, adapted_weights
from orbit_runtime.planner.job import Machine, build_job
from orbit_runtime.planner.support.kernels import expert_layouts
from orbit_runtime.planner.support.served import module_name
from orbit_runtime.policy.facts import PolicyFacts, RoutedFacts
from orbit_runtime.sides.trainers import adapter_config
from orbit_runtime.spec import OrbitRun
from tests.unit_runtime.planner.drawn_cases import draw_machine, draw_run
from tests.unit_runtime.planner.test_support import objection


def facts_of(run: OrbitRun, model: ModelFacts) -> PolicyFacts:
    """The facts that a loaded policy would give."""
    shape = model.architecture
    adapted = adapted_weights(shape, build_job(run, Machine(None)))
    return PolicyFacts(
        shape.vocab_size, model.precision, "bfloat16", adapter_config(run.spec),
        tuple(dict.fromkeys(module_name(each) for each in adapted)),
        frozenset(module_name(each) for each in shape.weights if each.is_linear and each.role not in LEFT_OUT),
        InjectReport((), 0),
        expert_layouts(model) if any(each.role == "routed_expert" for each in adapted) else (),
        None,
        RoutedFacts(shape.num_layers, (0,), shape.experts_per_token) if shape.num_experts else None,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_published_model_that_fits_is_accepted_by_every_builder_of_flags() -> None:
    random, found = Random(6), Counter[str]()
    cards = sorted(repositories())
    while found.total() < 200:
        model, machine = card_facts(random.choice(cards)), draw_machine(random)
        run = draw_run(random, model.architecture.targets())
        if run is not None:
            facts = None if run.spec.adapter.type == "Full" else facts_of(run, model)
            found[objection(run, facts, model, machine, judge(run, model, machine))] += 1
    del found[""]
    assert not found, found.most_common(3)
