"""`Auto`, the identity of a run, and what may differ on resume."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orbit_runtime.spec import (
    MachineFacts,
    OrbitRun,
    Resolved,
    differences,
    identity_digest,
    identity_fields,
    keep_decisions,
    parse_manifest,
    resolve,
)
from orbit_runtime.spec.fields import all_fields, field_sets
from orbit_runtime.spec.objectives import CORRECTIONS, OBJECTIVES
from orbit_runtime.spec.resolve import has_bf16_products, with_size, with_trainer
from orbit_runtime.spec.run import upgrade_manifest

TEXT = """\
apiVersion: orbitrl.dev/v1alpha1
kind: OrbitRun
metadata: {name: run}
spec:
  model: {uri: builtin://tiny-adder}
  data: {prompts: [{uri: p.jsonl}]}
  environment: {rewards: [{name: correct, type: ExactMatch}]}
  training: {steps: 5}
"""
CPU, GPU = MachineFacts(has_cuda=False, num_gpus=0), MachineFacts(has_cuda=True, num_gpus=1)


def build(*overrides: str) -> OrbitRun:
    return parse_manifest(TEXT, name="run.yaml", overrides=overrides, environ={})


def resolved(*overrides: str) -> Resolved:
    return resolve(build(*overrides), CPU, folder=Path("/project"))


def test_auto_is_decided_by_the_machine() -> None:
    cpu, gpu = resolve(build(), CPU), resolve(build(), GPU)
    assert (cpu.trainer, cpu.engine, cpu.device, cpu.compute_dtype) == ("Torch", "Torch", "cpu", "float32")
    assert (gpu.trainer, gpu.engine, gpu.device, gpu.compute_dtype) == ("Torch", "Torch", "cuda", "bfloat16")
    assert cpu.run.spec.training.attention == "SDPA"


def test_auto_precision_of_a_shipped_model_is_its_quantised_variant_and_of_a_folder_stays_open() -> None:
    assert resolved().run.spec.model.precision == "INT4"
    assert resolved("model.precision=BF16").run.spec.model.precision == "BF16"
    assert resolved("model.uri=m").run.spec.model.precision == "Auto"


def test_adapters_reach_servers_of_our_own_through_memory_unless_asked_otherwise() -> None:
    decided = {
        engine: resolved(f"rollout.engine={engine}", *more).run.spec.rollout.adapter_transport
        for engine, *more in (("Torch",), ("SGLang",), ("OpenAI", "rollout.endpoints=[{url: 'http://a'}]"))
    }
    assert decided == {"Torch": "File", "SGLang": "SharedMemory", "OpenAI": "File"}
    split = resolved("rollout.engine=SGLang", "placement={layout: Split, gpus: 2}").run.spec.rollout
    assert split.adapter_transport == "File", "the engine's container does not see the trainer's memory"
    asked = resolved("rollout.engine=SGLang", "rollout.adapterTransport=File")
    assert asked.run.spec.rollout.adapter_transport == "File"


def test_nothing_that_can_be_decided_stays_auto() -> None:
    text = json.dumps(
        resolved(
            "data.prompts[0].format=JSONL", "training.recompute=None", "observability.logFormat=JSON"
        ).run.to_manifest()
    )
    assert "Auto" not in text


def test_relative_paths_start_at_the_manifests_folder_and_output_at_the_current_one() -> None:
    run = resolved("model.uri=../models/x", "data.prompts=[{uri: p.jsonl}, {uri: /abs/q}, {uri: 'file:///r'}]").run
    assert run.spec.model.uri == "/models/x"
    assert [each.uri for each in run.spec.data.prompts] == ["/project/p.jsonl", "/abs/q", "file:///r"]
    assert run.spec.storage.uri == "runs"


def test_what_was_asked_stays_beside_what_was_decided() -> None:
    facts = resolved().to_json()
    assert facts["asked"]["spec"]["rollout"]["engine"] == "Auto"
    assert facts["resolved"]["spec"]["rollout"]["engine"] == "Torch"
    assert facts["identity"] == resolved().identity
    assert json.loads(json.dumps(facts)) == facts


def test_the_rate_decays_to_the_steps_of_the_first_start() -> None:
    linear = "training.schedule.type=Linear"
    assert resolved().decay_steps is None
    first = resolved(linear)
    assert first.decay_steps == 5
    longer = resolved(linear, "training.steps=9")
    assert longer.decay_steps == 9
    assert longer.identity != first.identity
    kept = keep_decisions(longer, first.run.to_manifest())
    assert (kept.decay_steps, kept.run.spec.training.steps, kept.identity) == (5, 9, first.identity)


def test_decay_steps_that_were_asked_for_are_not_replaced_by_those_of_the_first_start() -> None:
    first = resolved("training.schedule.type=Linear").run.to_manifest()
    asked = resolved("training.schedule={type: Linear, decaySteps: 7}")
    assert keep_decisions(asked, first).decay_steps == 7
    constant = resolved()
    assert keep_decisions(constant, first) == constant


@pytest.mark.parametrize(
    ("adapter", "parameters", "rate"),
    [
        ("LoRA", 1e6, 2e-3), ("OFT", 1e6, 1e-3), ("LoRA", 134e6, 5e-4), ("OFT", 134e6, 1e-3),
        ("LoRA", 8e9, 1e-4), ("Full", 1e6, 1e-4), ("LoRA", math.inf, 1e-4),
    ],
)  # fmt: skip
def test_a_rate_that_is_not_set_suits_adapter_and_size_and_is_that_of_the_first_start(
    adapter: str, parameters: float, rate: float
) -> None:
    precision = "model={uri: builtin://tiny-adder, precision: BF16}"
    open_, asked = resolved(f"adapter.type={adapter}", precision), resolved("training.learningRate=0.5")
    assert "spec.training.learningRate" not in identity_fields(open_.run)
    first = with_size(open_, parameters)
    assert first.run.spec.training.decided_rate == rate
    assert with_size(asked, parameters) == asked
    kept = with_size(keep_decisions(open_, first.run.to_manifest()), 1.0)
    assert (kept.run.spec.training.decided_rate, kept.identity) == (rate, first.identity)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile amx_int8", True),  # Sapphire Rapids
        ("fpu avx2 avx512f avx512_bf16 avx512_vnni", True),  # Zen 4, Cooper Lake
        ("fpu avx2 avx512f avx512_vnni avx512_vbmi2", False),  # Ice Lake
        ("fpu avx2 fma", False), ("fp asimd bf16", False), ("", False),
    ],
)  # fmt: skip
def test_the_dtype_of_products_follows_from_processor_and_size_and_is_that_of_the_first_start(
    flags: str, expected: bool
) -> None:
    machine = replace(CPU, multiplies_bf16=has_bf16_products(flags.split()))

    def computed(*settings: str, size: float = 134e6) -> str:
        run = build("model.uri=models/any", *settings)
        return with_size(resolve(run, machine), size).run.spec.model.compute_precision

    assert computed() == ("BF16" if expected else "FP32")
    assert computed("model.computePrecision=FP32") == computed(size=1e6) == computed(size=math.inf) == "FP32"
    for setting in ("model.uri=builtin://tiny-adder", "rollout.engine=SGLang", "adapter.type=Full"):
        assert computed(setting) == "FP32", setting
    first = with_size(resolve(build("model.uri=models/any"), machine), 134e6)
    other = resolve(first.asked, replace(CPU, multiplies_bf16=not expected))
    kept = with_size(keep_decisions(other, first.run.to_manifest()), 134e6)
    assert kept.compute_dtype == first.compute_dtype


def test_a_model_that_moved_out_of_the_package_keeps_its_precision() -> None:
    first = resolved("model.uri=builtin://tiny-adder").run.to_manifest()
    moved = keep_decisions(resolved("model.uri=/copy"), first)
    assert moved.run.spec.model.precision == "INT4"
    assert [each.path for each in differences(first, moved.run.to_manifest())] == ["spec.model.uri"]
    other = keep_decisions(resolved("model.uri=/copy", "model.precision=BF16"), first)
    assert [each.path for each in differences(first, other.run.to_manifest())] == [
        "spec.model.uri",
        "spec.model.precision",
    ]


def test_every_field_is_in_one_of_the_three_sets() -> None:
    without = [field.path for field in all_fields() if field.path not in field_sets()]
    assert without == []
    assert set(field_sets().values()) == {"identity", "layout", "display"}


def test_a_relative_folder_of_code_starts_where_the_manifest_is() -> None:
    found = resolved("environment.code={uri: ../mine}").run.spec.environment
    assert found.code is not None
    assert found.code.uri == "/mine"


def test_the_sets_are_those_of_the_design() -> None:
    def of(name: str) -> list[str]:
        return [path.removeprefix("spec.") for path, owner in field_sets().items() if owner == name]

    assert of("layout") == [
        "model.uri",
        "model.computePrecision",
        "adapter.initFrom",
        "algorithm.teacher.uri",
        "algorithm.teacher.endpoints[].url",
        "algorithm.teacher.endpoints[].apiKeyEnv",
        "algorithm.teacher.endpoints[].headers[].name",
        "algorithm.teacher.endpoints[].headers[].value",
        "algorithm.teacher.endpoints[].headers[].valueEnv",
        "algorithm.teacher.preflight",
        "algorithm.teacher.preflightPrompts",
        "data.prompts[].uri",
        "environment.limits.startSeconds",
        "environment.limits.memory",
        "environment.limits.processes",
        "environment.limits.mayFork",
        "environment.code.uri",
        "environment.variables",
        "rollout.engine",
        "rollout.replicas",
        "rollout.tensorParallel",
        "rollout.endpoints[].url",
        "rollout.endpoints[].apiKeyEnv",
        "rollout.endpoints[].headers[].name",
        "rollout.endpoints[].headers[].value",
        "rollout.endpoints[].headers[].valueEnv",
        "rollout.endpoints[].adapterMethod",
        "rollout.adapterFolder",
        "rollout.adapterTransport",
        "rollout.sleep",
        "rollout.deterministic",
        "rollout.engineVersion",
        "rollout.maxRunningRequests",
        "rollout.engineArguments",
        "training.trainer",
        "training.microBatchTokens",
        "training.parallel.tensor",
        "training.parallel.expert",
        "training.parallel.pipeline",
        "training.parallel.context",
        "training.parallel.data",
        "training.attention",
        "training.recompute",
        "parity.everySteps",
        "parity.maxUnproven",
        *(path for path in of("layout") if path.startswith("placement.")),
    ]
    assert of("display") == [
        "metadata.name",
        "metadata.namespace",
        "metadata.labels",
        "metadata.annotations",
        "training.steps",
        *(path for path in of("display") if path.startswith("training.stopWhen.")),
        *(path for path in of("display") if path.startswith("evaluation.")),
        "checkpoint.everySteps",
        "checkpoint.keep",
        *(path for path in of("display") if path.startswith("checkpoint.keepBest.")),
        "checkpoint.acceptCode",
        "storage.uri",
        "storage.credentialsSecretName",
        "storage.serviceAccountName",
        "storage.deletionPolicy",
        *(path for path in of("display") if path.startswith("lifecycle.")),
        "observability.metricsPort",
        "observability.logLevel",
        "observability.logFormat",
        *(path for path in of("display") if path.startswith(("observability.trackers", "observability.notify"))),
    ]


@pytest.mark.parametrize(
    "override",
    [
        "training.steps=9",
        "metadata.name=other",
        "metadata.labels={a: b}",
        "checkpoint.everySteps=3",
        "storage.uri=/elsewhere",
        "observability.logLevel=Debug",
        "environment.limits.memory=2Gi",
        "rollout.engine=Torch",
        "rollout.deterministic=true",
        "rollout={engine: SGLang, engineVersion: Any}",
        "parity.everySteps=5",
        "training.microBatchTokens=64",
        "training.attention=Eager",
        "training.recompute=PerLayer",
        "model.precision=INT4",
        "data.prompts=[{uri: moved/p.jsonl}]",
        "algorithm={clip: {low: 0.2, high: 0.2}, reduction: Token, kl: {placement: Loss, estimator: K3}}",
        "algorithm.advantage={baseline: GroupMean, normalize: Group}",
        "algorithm={overlong: {penalty: 0}, dynamicSampling: {maxRounds: 0}}",
    ],
)
def test_display_layout_and_defaults_written_out_leave_the_identity_alone(override: str) -> None:
    assert resolved(override).identity == resolved().identity


@pytest.mark.parametrize(
    "override",
    [
        "model.precision=BF16",
        "adapter.lora.rank=8",
        "adapter.type=OFT",
        "algorithm.kl.coefficient=0.1",
        "data.seed=1",
        "data.limit=9",
        "data.prompts=[{uri: p.jsonl}, {uri: q.jsonl}]",
        "data.prompts=[{uri: p.jsonl, promptField: question}]",
        "data.chat.templateArguments={enable_thinking: false}",
        "data.chat.keepTokens=[<think>]",
        "environment={type: MultiTurn, tools: [a:f], rewards: [{name: correct, type: ExactMatch}]}",
        "environment.limits.turns=3",
        "environment.rewards[0].weight=2",
        "environment.rewards[0].arguments={a: 1}",
        "rollout.sampling.stop=[x]",
        "rollout.overSampling=4",
        "training.learningRate=0.0001",
        "training.promptsPerStep=16",
        "training.schedule.type=Cosine",
        "parity.floorFactor=5",
        "parity.k3Limit=0.1",
    ],
)
def test_what_changes_the_maths_changes_the_identity(override: str) -> None:
    assert resolved(override).identity != resolved().identity


def test_the_digest_is_stable() -> None:
    """It stands in checkpoints: a change here makes every older one unreadable, so it must be meant."""
    decided = ("training.learningRate=1e-4", "rollout.sampling.maxNewTokens=256")
    run = build("model.uri=/m", "data.prompts[0].uri=/p", "model.precision=INT4", *decided)
    assert identity_digest(run) == "sha256:560f8e5b92cf58af785c397d3a75fac376dcc8ade04f6b1cf7cad031d592eafc"


def test_a_field_that_came_later_is_part_of_the_identity_only_where_it_is_not_its_default() -> None:
    older = resolved().run.to_manifest()
    for name in ("minP", "repetitionPenalty", "logitBias", "stopTokenIds", "ignoreEos"):
        del older["spec"]["rollout"]["sampling"][name]
    assert differences(older, resolved().run.to_manifest()) == []
    others = "topK=5", "minP=0.1", "repetitionPenalty=1.1", "logitBias.7=1", "stopTokenIds=[7]", "ignoreEos=true"
    for override in others:
        changed = resolved(f"rollout.sampling.{override}")
        assert changed.identity != resolved().identity
        (found,) = differences(older, changed.run.to_manifest())
        assert found.set == "identity"


def test_what_the_algorithm_leaves_open_is_decided_by_its_type_and_stands_in_the_resolved_manifest() -> None:
    decided = resolved("algorithm.type=DAPO").run.to_manifest()["spec"]["algorithm"]
    assert decided["clip"] == {"low": 0.2, "high": 0.28}
    assert decided["overlong"] == {"penalty": 1.0, "bufferShare": 0.2}
    assert decided["dynamicSampling"] == {"maxRounds": 10}
    assert decided["kl"]["estimator"] == "K3"
    asked = resolved("algorithm={type: DAPO, clip: {high: 0.3}, dynamicSampling: {maxRounds: 0}}")
    assert asked.run.spec.algorithm.clip.high == 0.3
    assert asked.run.spec.algorithm.dynamic_sampling.max_rounds == 0
    cispo = resolved("algorithm.type=CISPO").run.to_manifest()["spec"]["algorithm"]
    assert cispo["clip"] == {"high": 4.0}, "what a type does not read stays unset"


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_a_resolved_manifest_is_a_manifest_of_the_same_identity(name: str) -> None:
    own = {"Custom": ["algorithm.entrypoint=m:f"], "Distillation": ["algorithm.teacher={}"]}.get(name, [])
    for correction in CORRECTIONS:
        first = resolved(f"algorithm.type={name}", f"algorithm.importanceSampling.type={correction}", *own)
        again = OrbitRun.model_validate(first.run.to_manifest())
        assert resolve(again, CPU, folder=Path("/project")).run == first.run
        assert identity_digest(again) == first.identity


def test_every_algorithm_and_correction_has_an_identity_of_its_own() -> None:
    kinds = [[f"algorithm.type={name}"] for name in OBJECTIVES if name not in ("Custom", "Distillation")]
    kinds += [["algorithm={type: Distillation, teacher: {}}"], ["algorithm.teacher={}"]]
    kinds += [["algorithm.teacher={type: Average}"], ["algorithm.teacher.over=Sampled"]]
    kinds += [["algorithm={type: Custom, entrypoint: m:f}"], ["algorithm={type: Custom, entrypoint: m:g}"]]
    kinds += [[f"algorithm.importanceSampling.type={name}"] for name in CORRECTIONS if name != "None"]
    kinds += [["algorithm.advantage.baseline=LeaveOneOut"], ["algorithm.kl.importanceWeighted=true"]]
    kinds += [["algorithm.overlong.penalty=1"], ["algorithm.dynamicSampling.maxRounds=3"]]
    assert len({resolved(*each).identity for each in kinds}) == len(kinds)


def test_what_earlier_versions_always_did_is_no_part_of_the_identity() -> None:
    older = resolved().run.to_manifest()
    del older["spec"]["algorithm"]["advantage"]["baseline"]
    for name in ("overlong", "dynamicSampling"):
        del older["spec"]["algorithm"][name]
    del older["spec"]["algorithm"]["kl"]["importanceWeighted"]
    assert differences(older, resolved().run.to_manifest()) == []
    (found,) = differences(older, resolved("algorithm.advantage.baseline=LeaveOneOut").run.to_manifest())
    assert (found.path, found.set) == ("spec.algorithm.advantage.baseline", "identity")


def test_what_a_run_reads_is_part_of_its_identity_and_where_it_lies_is_not() -> None:
    here, there = build("model.uri=/a/m"), build("model.uri=/b/m")
    one, two = {"content.model.weights": "sha256:1"}, {"content.model.weights": "sha256:2"}
    assert identity_digest(here, one) == identity_digest(there, one)
    assert identity_digest(here, one) != identity_digest(here, two)
    assert identity_digest(here, one) != identity_digest(here)


def test_identity_fields_name_each_field_by_its_path() -> None:
    fields = identity_fields(build("adapter.lora.rank=4"))
    assert fields["spec.adapter.lora.rank"] == 4
    assert fields["spec.data.prompts[0].promptField"] == "prompt"
    assert "spec.data.prompts[0].uri" not in fields
    assert "spec.model.uri" not in fields
    assert "spec.training.steps" not in fields
    assert not any(path.startswith("spec.adapter.oft") for path in fields)


def test_differences_name_path_set_and_both_values() -> None:
    old = resolved().run.to_manifest()
    new = resolved(
        "training.steps=9", "adapter.lora.rank=8", "data.limit=3", "training.attention=Eager"
    ).run.to_manifest()
    assert [tuple(each) for each in differences(old, new)] == [
        ("spec.adapter.lora.rank", "identity", 16, 8),
        ("spec.data.limit", "identity", None, 3),
        ("spec.training.steps", "display", 5, 9),
        ("spec.training.attention", "layout", "SDPA", "Eager"),
    ]
    assert differences(old, old) == []


def test_a_field_of_another_version_counts_as_identity() -> None:
    old: dict[str, Any] = resolved().run.to_manifest()
    old["spec"]["algorithm"]["entropyBonus"] = 0.1
    assert [tuple(each) for each in differences(old, resolved().run.to_manifest())] == [
        ("spec.algorithm.entropyBonus", "identity", 0.1, None)
    ]


@pytest.mark.parametrize(("layout", "now"), [("Colocated", "SharedMemory"), ("Split", "File")])
def test_a_stored_manifest_with_a_transport_that_is_gone_is_the_same_run_by_another(layout: str, now: str) -> None:
    run = resolved("rollout.engine=SGLang", f"placement={{layout: {layout}, gpus: 2}}").run.to_manifest()
    old = copy.deepcopy(run)
    old["spec"]["rollout"]["adapterTransport"] = "Broadcast"
    assert [tuple(each) for each in differences(old, run)] == [
        ("spec.rollout.adapterTransport", "layout", "Broadcast", now)
    ]
    upgraded = OrbitRun.model_validate(upgrade_manifest(old))
    assert resolve(upgraded, CPU).run.to_manifest() == upgraded.to_manifest() == run
    assert upgrade_manifest(run) == run


def test_the_identity_is_the_digest_of_what_differences_call_identity() -> None:
    one, two = resolved("training.steps=9"), resolved("training.steps=7", "training.attention=Eager")
    assert not [each for each in differences(one.run.to_manifest(), two.run.to_manifest()) if each.set == "identity"]
    assert one.identity == two.identity


def test_on_several_gpus_trainer_and_engine_are_left_to_the_plan() -> None:
    run = resolved().asked
    left = resolve(run, MachineFacts(has_cuda=True, num_gpus=8))
    decided = (left.trainer, left.engine, left.run.spec.rollout.adapter_transport, left.run.spec.placement.base_copies)
    assert decided == ("Auto", "Auto", "Auto", "Auto")
    for trainer, engine, transport, copies in (
        ("Megatron", "SGLang", "SharedMemory", "Two"), ("Torch", "Torch", "File", "Shared"),
    ):  # fmt: skip
        made = with_trainer(left, trainer)
        spec = made.run.spec
        found = (made.trainer, made.engine, spec.rollout.adapter_transport, spec.placement.base_copies)
        assert found == (trainer, engine, transport, copies)
        assert made.identity == left.identity
    one = resolve(run, MachineFacts(has_cuda=True, num_gpus=1))
    assert (one.trainer, one.engine) == ("Torch", "Torch")
    assert with_trainer(one, "Megatron") is one
    asked = resolved("training.trainer=Megatron")
    assert (asked.trainer, asked.engine) == ("Megatron", "SGLang")
