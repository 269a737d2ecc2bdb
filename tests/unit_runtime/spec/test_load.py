"""Every way a manifest can be wrong, with the words that its author reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from orbit_runtime.errors import ManifestError
from orbit_runtime.spec import OrbitRun, load_manifest, parse_manifest
from orbit_runtime.spec.environment import RewardType

GOOD = """\
apiVersion: orbitrl.dev/v1alpha1
kind: OrbitRun
metadata:
  name: run
spec:
  model:
    uri: builtin://tiny-adder
  adapter:
    type: LoRA
  algorithm:
    groupSize: 8
  data:
    prompts:
      - uri: prompts.jsonl
  environment:
    rewards:
      - name: correct
        type: ExactMatch
  rollout:
    engine: Auto
  training:
    steps: 5
"""


def parse(text: str, *overrides: str, **environ: str) -> OrbitRun:
    return parse_manifest(text, name="run.yaml", overrides=overrides, environ=environ)


def problems_of(text: str, *overrides: str, **environ: str) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        parse(text, *overrides, **environ)
    assert caught.value.exit_code == 64
    return [str(problem) for problem in caught.value.problems] or [str(caught.value)]


def test_a_good_manifest_loads_with_its_defaults() -> None:
    run = parse(GOOD)
    assert run.name == "run"
    assert run.spec.adapter.type == "LoRA"
    assert run.spec.adapter.lora is not None
    assert run.spec.adapter.lora.rank == 16
    assert run.spec.adapter.oft is None
    assert run.spec.training.learning_rate is None
    assert run.spec.storage.uri == "runs"


FIELDS = [
    (
        "    groupSize: 8",
        "    groupsize: 8",
        "run.yaml:11: spec.algorithm.groupsize: unknown field\n  fix: did you mean `groupSize`?",
    ),
    (
        "    groupSize: 8",
        "    group_size: 8",
        "run.yaml:11: spec.algorithm.group_size: unknown field\n  fix: did you mean `groupSize`?",
    ),
    (
        "    groupSize: 8",
        "    learningRate: 0.1",
        "run.yaml:11: spec.algorithm.learningRate: unknown field here\n"
        "  fix: did you mean `spec.training.learningRate`?",
    ),
    (
        "    groupSize: 8",
        "    xyzzy: 1",
        "run.yaml:11: spec.algorithm.xyzzy: unknown field\n"
        "  fix: its block has the fields type, entrypoint, groupSize, kl, clip, advantage, "
        "reduction, importanceSampling, overlong, dynamicSampling, critic, teacher",
    ),
    (
        "    type: LoRA",
        "    type: lora",
        'run.yaml:9: spec.adapter.type: `"lora"` is not one of its values\n'
        "  fix: did you mean `LoRA`? allowed: `LoRA` `OFT` `Full`",
    ),
    (
        "        type: ExactMatch",
        "        type: exact_match",
        'run.yaml:18: spec.environment.rewards[0].type: `"exact_match"` is not one of its values\n'
        "  fix: did you mean `ExactMatch`? "
        f"allowed: {' '.join(f'`{name}`' for name in get_args(RewardType))}",
    ),
    (
        "    engine: Auto",
        "    engine: 7",
        "run.yaml:20: spec.rollout.engine: `7` is not one of its values\n"
        "  fix: allowed: `Auto` `Torch` `SGLang` `OpenAI`",
    ),
    (
        "    engine: Auto",
        "    engine: SGLang\n    adapterTransport: Broadcast",
        'run.yaml:21: spec.rollout.adapterTransport: `"Broadcast"` is not one of its values\n'
        "  fix: did you mean `SharedMemory`? allowed: `Auto` `File` `SharedMemory`",
    ),
    (
        "    steps: 5",
        "    steps: 0",
        "run.yaml:22: spec.training.steps: `0` is out of range\n  fix: allowed: 1 to 100000000",
    ),
    (
        "    steps: 5",
        "    promptsPerStep: 4",
        "run.yaml:21: spec.training.steps: this field is missing\n"
        "  fix: write a whole number, 1 to 100000000, e.g. `steps: 100`",
    ),
    (
        "    steps: 5",
        "    steps:",
        "run.yaml:22: spec.training.steps: the value is empty\n"
        "  fix: write a whole number, 1 to 100000000, e.g. `steps: 100`",
    ),
    (
        "    steps: 5",
        '    steps: "5"',
        'run.yaml:22: spec.training.steps: `"5"` is text\n'
        "  fix: write a whole number, 1 to 100000000, e.g. `steps: 100`",
    ),
    (
        "    steps: 5",
        "    steps: 5.5",
        "run.yaml:22: spec.training.steps: `5.5` is a number\n"
        "  fix: write a whole number, 1 to 100000000, e.g. `steps: 100`",
    ),
    (
        "    steps: 5",
        "    steps: true",
        "run.yaml:22: spec.training.steps: `true` is a boolean\n"
        "  fix: write a whole number, 1 to 100000000, e.g. `steps: 100`",
    ),
    (
        "    steps: 5",
        "    steps: 5\n    learningRate: .inf",
        "run.yaml:23: spec.training.learningRate: `Infinity` is out of range\n  fix: allowed: above 0, at most 1",
    ),
    (
        "  name: run",
        "  name: My_run",
        'run.yaml:4: metadata.name: `"My_run"` is not allowed\n'
        "  fix: write lower-case letters, digits and `-`, with a letter or digit at both ends",
    ),
    (
        "  name: run",
        f"  name: {'a' * 53}",
        f'run.yaml:4: metadata.name: `"{"a" * 53}"` has 53 characters\n  fix: allowed: 1 to 52 characters',
    ),
    (
        "      - uri: prompts.jsonl",
        "      []",
        "run.yaml:13: spec.data.prompts: it holds nothing\n  fix: allowed: 1 to 64 items",
    ),
    (
        "      - uri: prompts.jsonl",
        "      - prompts.jsonl",
        'run.yaml:14: spec.data.prompts[0]: `"prompts.jsonl"` is text\n'
        "  fix: write its fields below it: uri, format, promptField, completionField, toolsField, weight",
    ),
    (
        "    uri: builtin://tiny-adder",
        "    uri: az://org/name",
        "run.yaml:7: spec.model.uri: `az://org/name` is not something Orbit can open here\n"
        "  fix: allowed: a path, `builtin://`, `file://`, `hf://`, `s3://`, `pvc://`",
    ),
    (
        "    uri: builtin://tiny-adder",
        "    uri: bultin://tiny-adder",
        "run.yaml:7: spec.model.uri: `bultin://tiny-adder` is not something Orbit can open here\n"
        "  fix: did you mean `builtin://`? allowed: a path, `builtin://`, `file://`, `hf://`, `s3://`, `pvc://`",
    ),
    (
        "    uri: builtin://tiny-adder",
        "    uri: file://models/x",
        "run.yaml:7: spec.model.uri: `file://models/x` does not hold an absolute path\n"
        "  fix: write the path alone: `models/x`",
    ),
    (
        "    uri: builtin://tiny-adder",
        "    uri: builtin://",
        "run.yaml:7: spec.model.uri: `builtin://` names nothing after `builtin://`\n  fix: write its name",
    ),
    (
        "  model:\n    uri: builtin://tiny-adder\n",
        "",
        "run.yaml:5: spec.model: this block is missing\n  fix: add `model:` with `uri`",
    ),
    (
        "    type: LoRA",
        "    type: LoRA\n    type: OFT",
        "run.yaml:10: spec.adapter.type: `type` appears here twice, first on line 9\n  fix: keep one of the two",
    ),
    (
        "    type: LoRA",
        "    <<: {type: LoRA}",
        "run.yaml:9: spec.adapter.<<: merge keys are YAML 1.1 and not 1.2\n  fix: write the fields out",
    ),
    (
        "kind: OrbitRun",
        "kind: Orbitrun",
        'run.yaml:2: kind: `"Orbitrun"` is not one of its values\n  fix: did you mean `OrbitRun`? allowed: `OrbitRun`',
    ),
    (
        "        type: ExactMatch",
        "        type: ExactMatch\n        arguments: {limits: {a: .nan}}",
        "run.yaml:19: spec.environment.rewards[0].arguments.limits: `NaN` is out of range\n"
        "  fix: allowed: what JSON can say",
    ),
]

CONTRADICTIONS = [
    (
        "    type: LoRA",
        "    type: LoRA\n    oft: {blockSize: 4}",
        "run.yaml:10: spec.adapter.oft: settings of OFT, but `type` is `LoRA`\n"
        "  fix: remove `oft`, or write `type: OFT`",
    ),
    (
        "    type: LoRA",
        "    type: OFT\n    lora: {rank: 4}",
        "run.yaml:10: spec.adapter.lora: settings of LoRA, but `type` is `OFT`\n"
        "  fix: remove `lora`, or write `type: LoRA`",
    ),
    (
        "    type: LoRA",
        "    type: OFT\n    oft: {parametrization: Cayley, neumannTerms: 3}",
        "run.yaml:10: spec.adapter.oft.neumannTerms: the exact `Cayley` transform has no series, "
        "so this field does nothing\n  fix: remove `neumannTerms`, or write `parametrization: CayleyNeumann`",
    ),
    (
        "    type: LoRA",
        "    targets: [q_proj, q_proj]",
        "run.yaml:9: spec.adapter.targets[1]: `q_proj` appears here twice\n  fix: name each once",
    ),
    (
        "    groupSize: 8",
        "    clip: {low: 0.3}",
        "run.yaml:11: spec.algorithm.clip.low: 0.3 is above `high` (0.2): "
        "good samples would be clipped before bad ones\n"
        "  fix: write `low: 0.2` or less, or raise `high`",
    ),
    (
        "    groupSize: 8",
        "    importanceSampling: {cap: 4}",
        "run.yaml:11: spec.algorithm.importanceSampling.cap: nothing is weighted while `type` is `None`, "
        "so this field does nothing\n  fix: remove `cap`, or write `type: TokenTruncated`",
    ),
    (
        "        type: ExactMatch",
        "        type: ExactMatch\n        entrypoint: a:b",
        "run.yaml:19: spec.environment.rewards[0].entrypoint: a reward has a `type` or an `entrypoint`, not both\n"
        "  fix: remove one of them",
    ),
    (
        "        type: ExactMatch",
        "        weight: 2",
        "run.yaml:17: spec.environment.rewards[0]: a reward needs a `type` or an `entrypoint`\n"
        "  fix: add `type: ExactMatch`, or `entrypoint: module:function`",
    ),
    (
        "        type: ExactMatch",
        "        type: ExactMatch\n      - {name: correct, type: Math}",
        "run.yaml:19: spec.environment.rewards[1]: `correct` is already the name of rewards[0]\n"
        "  fix: give each reward its own name",
    ),
    (
        "    steps: 5",
        "    steps: 5\n    miniBatchPrompts: 7",
        "run.yaml:23: spec.training.miniBatchPrompts: 7 does not divide `promptsPerStep` (32)\n"
        "  fix: write `miniBatchPrompts: 8`, or change `promptsPerStep`",
    ),
    (
        "    steps: 5",
        "    steps: 5\n    schedule: {decaySteps: 7}",
        "run.yaml:23: spec.training.schedule.decaySteps: a `Constant` rate does not decay, so this field does nothing\n"
        "  fix: remove `decaySteps`, or write `type: Linear` or `type: Cosine`",
    ),
    (
        "    steps: 5",
        "    steps: 5\n    schedule: {type: Linear, warmupSteps: 7, decaySteps: 7}",
        "run.yaml:23: spec.training.schedule.decaySteps: 7 is not after the warm-up, which ends at step 7\n"
        "  fix: write `decaySteps: 8` or more, or a shorter warm-up",
    ),
    (
        "    steps: 5",
        "    steps: 5\n    schedule: {type: Cosine, warmupSteps: 5}",
        "run.yaml:23: spec.training.schedule.warmupSteps: the warm-up ends at step 5, after the last step (5), "
        "so nothing is left to decay\n  fix: write a shorter warm-up, more `steps`, or `type: Constant`",
    ),
    (
        "    engine: Auto",
        "    sampling: {logitBias: {the: 1}}",
        "run.yaml:20: spec.rollout.sampling.logitBias: `the` is not the id of a token\n"
        "  fix: write the token's number in the model's vocabulary, such as '198'",
    ),
    (
        "    engine: Auto",
        "    sampling: {maxNewTokens: 2048}",
        "run.yaml:20: spec.rollout.sampling.maxNewTokens: 2048 leaves no room for a prompt within "
        "`spec.model.maxSequenceLength` (2048)\n  fix: lower `maxNewTokens`, or raise `spec.model.maxSequenceLength`",
    ),
]


def test_sampling_fields_that_are_not_written_or_not_used_refuse_no_short_sequence() -> None:
    short = GOOD.replace("builtin://tiny-adder", "builtin://tiny-adder\n    maxSequenceLength: 64")
    assert parse(short).spec.new_tokens < 64
    unused = short.replace("    groupSize: 8", "    type: SFT").replace("engine: Auto", "sampling: {maxNewTokens: 256}")
    assert parse(unused).spec.model.max_sequence_length == 64


@pytest.mark.parametrize(("good", "bad", "said"), FIELDS + CONTRADICTIONS)
def test_one_wrong_field_is_one_problem_with_line_value_and_fix(good: str, bad: str, said: str) -> None:
    assert GOOD.count(good) == 1
    assert problems_of(GOOD.replace(good, bad)) == [said]


@pytest.mark.parametrize(("good", "bad", "said"), CONTRADICTIONS)
def test_a_contradiction_is_found_in_a_file_with_another_error(good: str, bad: str, said: str) -> None:
    text = GOOD.replace(good, bad).replace("  name: run", "  nam: run")
    found = problems_of(text)
    assert said in found
    assert "run.yaml:4: metadata.nam: unknown field\n  fix: did you mean `name`?" in found


def test_a_contradiction_that_rests_on_a_wrong_value_is_not_reported() -> None:
    text = GOOD.replace("    steps: 5", "    steps: 5\n    promptsPerStep: 0\n    miniBatchPrompts: 7")
    assert problems_of(text) == [
        "run.yaml:23: spec.training.promptsPerStep: `0` is out of range\n  fix: allowed: 1 to 1000000"
    ]


def test_all_problems_of_a_file_come_at_once_in_the_order_of_its_lines() -> None:
    text = (
        GOOD.replace("type: LoRA", "type: lora").replace("groupSize: 8", "groupSize: 010").replace("steps: 5", "x: 5")
    )
    assert [problem.split(": ")[0] for problem in problems_of(text)] == [
        "run.yaml:9",
        "run.yaml:11",
        "run.yaml:21",
        "run.yaml:22",
    ]


WHOLE = [
    ("", "run.yaml: the file is empty\n  fix: `orbit init` writes one to start from"),
    ("# nothing\n", "run.yaml: the file is empty\n  fix: `orbit init` writes one to start from"),
    (
        "- a\n",
        "run.yaml:1: the file holds a list, not a manifest\n"
        "  fix: start with `apiVersion: orbitrl.dev/v1alpha1` and `kind: OrbitRun`",
    ),
    (
        GOOD + "---\n" + GOOD,
        "run.yaml:23: a second document starts here\n  fix: keep one run per file, and remove the `---`",
    ),
    ("spec:\n\tmodel: x\n", "run.yaml:2:1: there is a tab where YAML requires spaces\n  fix: indent with spaces"),
    (
        "spec: a: b\n",
        "run.yaml:1:8: not YAML: mapping values are not allowed here\n"
        "  fix: check here and the line before: the indentation, a space after each colon of a field, and quotes "
        "around text with `: `, `#`, `@` or brackets",
    ),
    (
        "spec:\n  - \x01\n",
        "run.yaml:2: not YAML: special characters are not allowed\n"
        "  fix: is this a text file? a manifest is plain UTF-8 text",
    ),
    (
        "spec: &a [*a]\n",
        "run.yaml:1: `*a` refers to nothing before it\n  fix: define it above with `&a`, or write the value out",
    ),
    (
        "spec: " + "[" * 200,
        "run.yaml: the file is nested more than 64 deep or holds more than 50000 values\n"
        "  fix: a manifest has a few dozen fields; is this the right file?",
    ),
    (
        "a: &a [1,1,1,1,1,1,1,1]\n"
        + "".join(f"{y}: &{y} [{','.join([f'*{x}'] * 8)}]\n" for x, y in zip("abcdefg", "bcdefgh", strict=True)),
        "run.yaml: the file is nested more than 64 deep or holds more than 50000 values\n"
        "  fix: a manifest has a few dozen fields; is this the right file?",
    ),
]


@pytest.mark.parametrize(("text", "said"), WHOLE)
def test_what_is_no_manifest_at_all_is_one_message(text: str, said: str) -> None:
    assert problems_of(text) == [said]


def test_an_alias_stands_for_its_value() -> None:
    text = GOOD.replace("groupSize: 8", "groupSize: &n 4").replace("steps: 5", "steps: *n")
    assert parse(text).spec.training.steps == 4


FILES = [
    (b"\xff\xfe\x00k", "{path}:1: not UTF-8 text (byte 0xff)\n  fix: save the file as UTF-8"),
    (b"a: 1\n\x80", "{path}:2: not UTF-8 text (byte 0x80)\n  fix: save the file as UTF-8"),
    (b"#" * ((1 << 20) + 1), "{path}: the file is larger than 1 MiB\n  fix: is this the manifest?"),
]


@pytest.mark.parametrize(("content", "said"), FILES, ids=["utf-16", "latin", "large"])
def test_a_file_that_is_no_text_is_one_message(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ManifestError) as caught:
        load_manifest(path)
    assert str(caught.value) == said.format(path=path)


def test_help_prints_nothing_of_the_environment() -> None:
    source = "import orbit_runtime.spec as spec; help(spec.load_manifest); help(spec.parse_manifest)"
    secret = {**os.environ, "SOME_API_KEY": "sk-not-to-be-seen"}
    shown = subprocess.run(
        [sys.executable, "-c", source], env=secret, capture_output=True, text=True, check=True
    ).stdout
    assert "load_manifest" in shown
    assert "sk-not-to-be-seen" not in shown


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="there is no such file"):
        load_manifest(tmp_path / "none.yaml")
    with pytest.raises(ManifestError, match="this is a folder"):
        load_manifest(tmp_path)


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_manifest(path) == parse(GOOD)


def test_variables_are_replaced_in_uris_and_nowhere_else() -> None:
    text = GOOD.replace("uri: prompts.jsonl", "uri: ${DATA}/${NAME:-prompts}.jsonl").replace(
        "type: ExactMatch", "type: ExactMatch\n        arguments: {field: '${DATA}', uri: '${DATA}'}"
    )
    run = parse(text, "storage.uri=${OUT:-}/runs", DATA="/data")
    assert run.spec.data.prompts[0].uri == "/data/prompts.jsonl"
    assert run.spec.storage.uri == "/runs"
    assert run.spec.environment.rewards[0].arguments == {"field": "${DATA}", "uri": "${DATA}"}


def test_a_variable_that_is_not_set_is_named() -> None:
    assert problems_of(GOOD.replace("uri: prompts.jsonl", "uri: ${DATA}/x")) == [
        "run.yaml:14: spec.data.prompts[0].uri: the environment variable `DATA` is not set\n"
        "  fix: set `DATA`, or give a default: `${DATA:-…}`"
    ]


def test_a_variable_in_no_known_form_is_refused() -> None:
    assert problems_of(GOOD.replace("uri: prompts.jsonl", "uri: ${DATA-x}/x")) == [
        "run.yaml:14: spec.data.prompts[0].uri: `${DATA-x}/x` holds a `${` that names no variable\n"
        "  fix: write `${NAME}` or `${NAME:-default}`"
    ]


@pytest.mark.parametrize(
    ("pod", "said"),
    [
        ("{hostNetwork: true}", "a run's pod takes no `hostNetwork`"),
        ("{runtimeClassName: 5}", "pod.runtimeClassName: this is not a text"),
        ("{volumes: {a: b}}", "pod.volumes: this is not a list of mappings"),
        ("{volumes: [a]}", "pod.volumes: this is not a list of mappings"),
        ("{volumes: [{name: a, hostPath: {path: /}}]}", "`hostPath` is not allowed here"),
        ("{volumes: [{name: a}]}", "a volume has no source"),
        ("{securityContext: {sysctls: []}}", "`sysctls` is not allowed here"),
        ("{affinity: {nodeAffinity: {}}}", "`nodeAffinity` is not allowed here"),
        ("{env: [{name: A, valueFrom: {}}]}", "`valueFrom` is not allowed here"),
        ("{env: [{name: ORBIT_CACHE, value: x}]}", "`ORBIT_CACHE` is set by Orbit"),
        ("{env: [{value: x}]}", "no variable can have this name"),
        ("{labels: {orbitrl.dev/attempt: '1'}}", "`orbitrl.dev/attempt` is set by Orbit"),
        ("{labels: {kueue.x-k8s.io/queue-name: a}}", "`kueue.x-k8s.io/queue-name` is set by Orbit"),
        ("{labels: {a: 5}}", "`a` is set by Orbit, or it or its value cannot be"),
        ("{annotations: {a: [b]}}", "`a` is set by Orbit, or it or its value cannot be"),
        ("{resources: {limits: {cpu: 4}}}", "`cpu` has a field of its own"),
        ("{resources: {limits: [a]}}", "this is not a mapping"),
        ("{resources: {requests: {}}}", "`requests` is not allowed here"),
        ("{gpuResource: ''}", "the pod gets its GPUs by claims"),
    ],
)
def test_what_a_pod_may_not_have_is_one_clear_error(pod: str, said: str) -> None:
    (problem,) = problems_of(GOOD, f"placement.pod={pod}")
    assert said in problem


def test_a_pod_may_have_what_clusters_ask_for() -> None:
    pod = (
        "{volumes: [{name: a, secret: {secretName: s}}], volumeMounts: [{name: a, mountPath: /a, readOnly: true}], "
        "resources: {limits: {rdma/ib: 1, hugepages-2Mi: 1Gi}, claims: [{name: gpus}]}, gpuResource: '', "
        "resourceClaims: [{name: gpus, resourceClaimName: ours}], labels: {kueue.x-k8s.io/priority-class: high}}"
    )
    assert parse(GOOD, f"placement.pod={pod}").spec.placement.pod["gpuResource"] == ""
