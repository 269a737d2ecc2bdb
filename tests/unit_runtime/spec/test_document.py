"""Scalars: which the two YAMLs read alike, and what is said of the others."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from ruamel.yaml import YAML

from orbit_runtime.errors import ManifestError
from orbit_runtime.spec.document import find_ambiguity, parse_document, read_scalar
from orbit_runtime.spec.load import parse_manifest

AMBIGUOUS = [
    ("010", "YAML 1.1 reads an octal number, YAML 1.2 a decimal one", '`10` for the number, or `"010"` for the text'),
    ("-08", "YAML 1.1 reads an octal number, YAML 1.2 a decimal one", '`-8` for the number, or `"-08"` for the text'),
    ("on", "YAML 1.1 reads true, YAML 1.2 text", '`true`, or `"on"` for the text'),
    ("Yes", "YAML 1.1 reads true, YAML 1.2 text", '`true`, or `"Yes"` for the text'),
    ("n", "YAML 1.1 reads false, YAML 1.2 text", '`false`, or `"n"` for the text'),
    ("OFF", "YAML 1.1 reads false, YAML 1.2 text", '`false`, or `"OFF"` for the text'),
    ("1_000", "YAML 1.1 reads a number, YAML 1.2 text", '`1000` for the number, or `"1_000"` for the text'),
    ("1_0.5", "YAML 1.1 reads a number, YAML 1.2 text", '`10.5` for the number, or `"1_0.5"` for the text'),
    ("0o10", "YAML 1.1 reads text, YAML 1.2 an octal number", '`8` for the number, or `"0o10"` for the text'),
    ("0b11", "YAML 1.1 reads a binary number, YAML 1.2 text", '`3` for the number, or `"0b11"` for the text'),
    ("0x_1F", "YAML 1.1 reads a number, YAML 1.2 text", '`31` for the number, or `"0x_1F"` for the text'),
    ("1:30", "YAML 1.1 reads a number in base 60, YAML 1.2 text", '`"1:30"` for the text'),
    ("2026-01-31", "YAML 1.1 reads a date, YAML 1.2 text", '`"2026-01-31"` for the text'),
    ("=", "YAML 1.1 reads a default value, YAML 1.2 text", '`"="` for the text'),
]


@pytest.mark.parametrize(("text", "reading", "instead"), AMBIGUOUS)
def test_a_scalar_that_the_two_yamls_read_differently_is_refused(text: str, reading: str, instead: str) -> None:
    document = parse_document(f"spec:\n  x: {text}\n", "run.yaml")
    assert [str(problem) for problem in document.problems] == [
        f"run.yaml:2: spec.x: `{text}` is ambiguous: {reading}\n  fix: write {instead}"
    ]
    assert parse_document(f'x: "{text}"\n', "run.yaml").problems == []


def valid(**spec: Any) -> str:
    """A manifest as JSON, with these blocks."""
    return json.dumps(
        {
            "apiVersion": "orbitrl.dev/v1alpha1",
            "kind": "OrbitRun",
            "metadata": {"name": "a"},
            "spec": {
                "model": {"uri": "builtin://tiny-adder"},
                "data": {"prompts": [{"uri": "a"}]},
                "environment": {"rewards": [{"name": "a", "type": "Math"}]},
                "training": {"steps": 1},
                **spec,
            },
        }
    )


@pytest.mark.parametrize(
    "text",
    ["0b_", "0o_", "-0x_", "0b" + "1" * 5000, "0x" + "f" * 3600, "-0x" + "f" * 3000, "0o" + "7" * 3000, "1" * 10**6,
     "a" * 10**6, '"' + "a" * 10**6 + '"', "[" + "{a: 1}, " * 2000 + "]"],
)  # fmt: skip
def test_no_value_ends_the_reader_or_is_shown_whole(text: str) -> None:
    manifest = valid().replace('{"steps": 1}', f'{{"steps": {text}}}')
    with pytest.raises(ManifestError) as caught:
        parse_manifest(manifest, name="run.yaml")
    assert "run.yaml:1: spec.training.steps" in str(caught.value)
    assert len(str(caught.value)) < 1500
    assert len(str(parse_failure(f"{text}: 1\n"))) < 1500


def parse_failure(text: str) -> ManifestError | None:
    try:
        parse_manifest(text, name="run.yaml")
    except ManifestError as error:
        return error
    return None


def test_of_many_problems_the_first_are_shown() -> None:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(valid(rollout={"sampling": {"stop": [1] * 2000}}), name="run.yaml")
    assert str(caught.value).startswith("run.yaml: 2000 problems in the manifest\n")
    assert str(caught.value).endswith("\n… and 1950 more")


def test_characters_that_are_none_are_named_with_their_line_and_pairs_of_json_are_read() -> None:
    for escape in ("\\UFFFFFFFF", "\\U00110000"):
        with pytest.raises(ManifestError, match=r"run\.yaml:2: an escape that names no character"):
            parse_document(f'a: 1\nb: "{escape}"\n', "run.yaml")
    (problem,) = parse_document('a:\n  b: "\\ud800"\n', "run.yaml").problems
    assert str(problem).startswith("run.yaml:2: a.b: half of a surrogate pair")
    assert parse_document('a: "\\ud83d\\ude00"\n', "run.yaml").value == {"a": "😀"}


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("http://evil/x", "`http://evil/x` is not something Orbit can open here"),
        ("hf://a", "`hf://a` is not something Orbit can open here"),
        ("s3://", "`s3://` names nothing after"),
        ("s3:/bucket", "write `s3://` before a name, or a path alone"),
        ("file:/x", "write `file://` before a name, or a path alone"),
        ("s3://us er/x", "names no bucket"),
        ("/", "is the whole file system"),
        ("file:///", "is the whole file system"),
        ("a\0b", "holds a control character"),
        ("a\nb", "holds a control character"),
        ("s3://user:topsecret@bucket/x", "holds a user or a password"),
        ("http://user:topsecret@bucket/x", "is not something Orbit can open here"),
    ],
)
def test_addresses_of_every_field_follow_one_rule_and_show_no_password(uri: str, told: str) -> None:
    fields: dict[str, Any] = {
        "storage.uri": {"storage": {"uri": uri}},
        "checkpoint.resumeFrom": {"checkpoint": {"resumeFrom": uri}},
        "adapter.initFrom": {"adapter": {"initFrom": uri}},
    }
    for field, spec in fields.items():
        with pytest.raises(ManifestError) as caught:
            parse_manifest(valid(**spec), name="run.yaml")
        assert f"run.yaml:1: spec.{field}" in str(caught.value)
        assert told in str(caught.value)
        assert "topsecret" not in str(caught.value)
    with pytest.raises(ManifestError, match="is the whole file system"):
        parse_manifest(valid(data={"prompts": [{"uri": "/"}]}), name="run.yaml")
    webhook = {"observability": {"notify": [{"url": "https://user:topsecret@host/x"}]}}
    with pytest.raises(ManifestError, match="the address holds a user or a password"):
        parse_manifest(valid(**webhook), name="run.yaml")
    with pytest.raises(ManifestError) as caught:
        parse_manifest(valid(), name="run.yaml", overrides=["storage.uri=s3://user:topsecret@bucket"])
    assert "topsecret" not in str(caught.value)


ALIKE: list[tuple[str, Any]] = [
    ("10", 10),
    ("0", 0),
    ("-3", -3),
    ("+3", 3),
    ("0x1F", 31),
    ("1.5", 1.5),
    ("-.5", -0.5),
    ("1.", 1.0),
    ("1e-4", 1e-4),
    ("2E+3", 2000.0),
    ("0.1", 0.1),
    (".inf", math.inf),
    ("-.INF", -math.inf),
    ("true", True),
    ("False", False),
    ("~", None),
    ("null", None),
    ("", None),
    ("tRUE", "tRUE"),
    ("1.2.3", "1.2.3"),
    ("a:b", "a:b"),
    ("my-run", "my-run"),
    ("nope", "nope"),
    ("1e", "1e"),
]


@pytest.mark.parametrize(("text", "value"), ALIKE)
def test_every_other_scalar_reads_as_an_independent_yaml_1_2_reader_does(text: str, value: Any) -> None:
    read = read_scalar(text)
    assert (read, type(read)) == (value, type(value))
    other = YAML(typ="safe", pure=True).load(f"x: {text}")["x"]
    assert (other, type(other)) == (value, type(value))
    assert find_ambiguity(text) is None


def test_an_ambiguous_or_odd_key_is_refused() -> None:
    document = parse_document("on: 1\n2: 3\n? [a]\n: 4\n", "run.yaml")
    assert [str(problem).split("\n")[0] for problem in document.problems] == [
        "run.yaml:1: on: `on` is ambiguous: YAML 1.1 reads true, YAML 1.2 text",
        "run.yaml:2: 2: `2` is not a field name",
        "run.yaml:3: ?: `?` is not a field name",
    ]


def test_tags_have_no_meaning_except_text() -> None:
    document = parse_document("a: !!str 5\nb: !!python/name:os.system x\nc: ! 6\n", "run.yaml")
    assert document.value["a"] == "5"
    assert [str(problem).split("\n")[0] for problem in document.problems] == [
        "run.yaml:2: b: the tag `tag:yaml.org,2002:python/name:os.system` has no meaning here"
    ]


def test_every_entry_knows_its_line() -> None:
    document = parse_document("spec:\n\n  a:\n  - x\n  - y: 1\n    z: {q: 2}\n", "run.yaml")
    assert document.lines == {
        ("spec",): 1,
        ("spec", "a"): 3,
        ("spec", "a", 0): 4,
        ("spec", "a", 1): 5,
        ("spec", "a", 1, "y"): 5,
        ("spec", "a", 1, "z"): 6,
        ("spec", "a", 1, "z", "q"): 6,
    }
