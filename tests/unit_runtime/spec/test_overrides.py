"""`--set path=value`."""

from __future__ import annotations

from typing import Any

import pytest

from orbit_runtime.errors import ManifestError
from orbit_runtime.spec import OrbitRun, parse_manifest

TEXT = """\
apiVersion: orbitrl.dev/v1alpha1
kind: OrbitRun
metadata: {name: run}
spec:
  model: {uri: m}
  data: {prompts: [{uri: p}], limit: 5}
  environment: {rewards: [{name: correct, type: ExactMatch}]}
  training: {steps: 5}
"""


def parse(*overrides: str, text: str = TEXT) -> OrbitRun:
    return parse_manifest(text, name="run.yaml", overrides=overrides, environ={})


def get(run: OrbitRun, path: str) -> Any:
    value: Any = run
    for part in path.split("."):
        value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("spec.training.steps=7", "spec.training.steps", 7),
        ("training.steps=7", "spec.training.steps", 7),
        ("training.learningRate=1e-3", "spec.training.learning_rate", 1e-3),
        ("metadata.name=other", "metadata.name", "other"),
        ("data.prompts[0].uri=q", "spec.data.prompts.0.uri", "q"),
        ("data.prompts.0.uri=q", "spec.data.prompts.0.uri", "q"),
        ("data.prompts=[{uri: a}, {uri: b}]", "spec.data.prompts.1.uri", "b"),
        ("data.limit=", "spec.data.limit", None),
        ("data.limit=null", "spec.data.limit", None),
        ("data.shuffle=false", "spec.data.shuffle", False),
        ("adapter.targets=[q_proj]", "spec.adapter.targets", ("q_proj",)),
        ("algorithm.kl.coefficient=0.5", "spec.algorithm.kl.coefficient", 0.5),
        ("environment.rewards[0].arguments.field=x", "spec.environment.rewards.0.arguments", {"field": "x"}),
        ('model.uri="a: b"', "spec.model.uri", "a: b"),
        ("model.uri=a=b", "spec.model.uri", "a=b"),
    ],
)
def test_a_field_is_set(override: str, path: str, value: Any) -> None:
    assert get(parse(override), path) == value


def test_the_last_of_two_wins() -> None:
    assert parse("training.steps=7", "training.steps=8").spec.training.steps == 8


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "training.steps",
            "--set training.steps: this is not `path=value`\n  fix: write e.g. `--set training.steps=5`",
        ),
        ("=5", "--set =5: this is not `path=value`\n  fix: write e.g. `--set training.steps=5`"),
        (
            "training.step=5",
            "--set training.step=5: `spec.training` has no field `step`\n  fix: did you mean `spec.training.steps`?",
        ),
        ("steps=5", "--set steps=5: `spec` has no field `steps`\n  fix: did you mean `spec.training.steps`?"),
        (
            "training.prompts_per_step=5",
            "--set training.prompts_per_step=5: `spec.training` has no field `prompts_per_step`\n"
            "  fix: did you mean `spec.training.promptsPerStep`?",
        ),
        (
            "training..steps=5",
            "--set training..steps=5: `training..steps` is not a path\n  fix: write names with dots: `training.steps`",
        ),
        (
            "training.steps=abc",
            '--set training.steps=abc: spec.training.steps: `"abc"` is text\n'
            "  fix: write a whole number, 1 to 100000000, e.g. `steps: 100`",
        ),
        (
            "training.steps=010",
            "--set training.steps=010: `010` is ambiguous: YAML 1.1 reads an octal number, YAML 1.2 a decimal one\n"
            '  fix: write `10` for the number, or `"010"` for the text',
        ),
        (
            "training.steps=[",
            "--set training.steps=[: `[` is not a YAML value\n  fix: put text with `:`, `#` or brackets in quotes",
        ),
        (
            "data.prompts.uri=x",
            "--set data.prompts.uri=x: `spec.data.prompts` is a list\n  fix: name the item: `spec.data.prompts[0]`",
        ),
        (
            "data.prompts[1].uri=x",
            "--set data.prompts[1].uri=x: `spec.data.prompts` has 1 items, and their count starts at 0\n"
            "  fix: set the whole list: `spec.data.prompts=[…]`",
        ),
        (
            "training.steps.x=5",
            "--set training.steps.x=5: `spec.training.steps` has no fields\n  fix: set it as a whole, e.g. to `{a: 1}`",
        ),
        (
            "adapter.oft.blockSize=8",
            "--set adapter.oft.blockSize=8: spec.adapter.oft: settings of OFT, but `type` is `LoRA`\n"
            "  fix: remove `oft`, or write `type: OFT`",
        ),
    ],
)
def test_a_wrong_override_is_named_by_its_words(override: str, said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse(override)
    assert [str(problem) for problem in caught.value.problems] == [said]


def test_an_override_repairs_a_field_that_is_wrong_in_the_file() -> None:
    assert parse("training.steps=7", text=TEXT.replace("steps: 5", "steps: 010")).spec.training.steps == 7
    assert parse("training.steps=7", text=TEXT.replace("steps: 5", "steps: x")).spec.training.steps == 7


def test_problems_of_overrides_and_of_the_file_come_together() -> None:
    with pytest.raises(ManifestError) as caught:
        parse("training.step=7", text=TEXT.replace("limit: 5", "limit: 0"))
    assert len(caught.value.problems) == 2
