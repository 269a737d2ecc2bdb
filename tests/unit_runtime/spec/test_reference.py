"""What is made from the models, and that the copies in the repository are not stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbit_runtime.errors import ManifestError
from orbit_runtime.spec import load_manifest, parse_manifest
from orbit_runtime.spec.fields import all_fields, find_schema, schema_tree
from orbit_runtime.spec.objectives import CORRECTIONS, OBJECTIVES
from orbit_runtime.spec.problems import _HINTS
from orbit_runtime.spec.template import render_template
from tools.reference.algorithms import render_algorithms
from tools.reference.generate import render_all, write_pages
from tools.reference.manifest import render_reference

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def test_the_generated_files_are_up_to_date() -> None:
    assert write_pages(render_all(), ["--check"], ROOT) == 0


def test_check_finds_a_stale_file_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_pages(render_all(), [], tmp_path) == 0
    assert write_pages(render_all(), ["--check"], tmp_path) == 0
    name = next(iter(render_all()))
    (tmp_path / name).write_text("old")
    assert write_pages(render_all(), ["--check"], tmp_path) == 1
    assert f"stale: {name}; run `make docs`" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "old"


def test_every_algorithms_defaults_say_where_they_are_from() -> None:
    page = render_algorithms()
    for name, row in OBJECTIVES.items():
        assert f"- `{name}`: {row.source}." in page
        assert row.paper.startswith("https://") or name == "Custom"
    assert all(each.source in page and each.source for name, each in CORRECTIONS.items() if name != "None")


def test_the_page_has_a_row_for_every_field() -> None:
    page = render_reference()
    for field in all_fields():
        block, _, name = field.path.rpartition(".")
        section = page.split(f"## `{block}`\n")[1].split("\n## ")[0] if block else page
        (row,) = [line for line in section.splitlines() if line.startswith(f"| `{name}` |")]
        assert f"| {field.schema['orbitSet']} |" in row


def test_every_field_says_what_it_means() -> None:
    assert [field.path for field in all_fields() if not field.schema.get("description")] == []


def test_every_pattern_is_explained_in_words() -> None:
    def patterns(schema: dict[str, object], path: str) -> list[str]:
        found = [path] if "pattern" in schema else []
        for name, child in schema.get("properties", {}).items():  # type: ignore[attr-defined]
            found += patterns(child, f"{path}.{name}".lstrip("."))
        if isinstance(schema.get("additionalProperties"), dict):
            found += patterns(schema["additionalProperties"], f"{path}.*")  # type: ignore[arg-type]
        return found + (patterns(schema["items"], f"{path}[]") if "items" in schema else [])  # type: ignore[arg-type]

    assert set(patterns(schema_tree(), "")) == set(_HINTS)


def test_every_needed_field_has_an_example_that_is_allowed() -> None:
    run = parse_manifest(render_template("run.yaml"), name="run.yaml", environ={})
    assert run.name == "my-run"
    for field in all_fields():
        if field.required:
            assert field.schema["examples"], field.path


def test_the_template_names_every_field_with_its_default() -> None:
    text = render_template("run.yaml")
    everything = "\n".join(line.replace("#", "", 1) if line.strip()[:2] not in ("# ", "#") else "" for line in
                           text.splitlines())  # fmt: skip
    with pytest.raises(ManifestError) as caught:
        parse_manifest(everything, name="run.yaml", environ={})
    # Both adapters at once, a critic beside GRPO, and an early end by nothing, is all that is wrong with it.
    wrong = [(problem.where or "").split(": ")[1] for problem in caught.value.problems]
    assert wrong == ["spec.adapter.oft", "spec.algorithm.critic", *["spec.training.stopWhen"] * 2]
    for first, following in (
        ("    oft:", "    targets:"),
        ("    critic:", "  data:"),
        ("    validation:", "    limit:"),
        ("    stopWhen:", "    promptsPerStep:"),
    ):
        everything = everything[: everything.index(first)] + everything[everything.index(following) :]
    assert parse_manifest(everything, name="x", environ={}) == parse_manifest(text, name="x", environ={})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_a_valid_manifest(path: Path) -> None:
    run = load_manifest(path, environ={})
    assert run.name == path.stem


def test_there_are_the_quickstarts() -> None:
    assert {"quickstart.yaml", "quickstart-oft.yaml"} <= {path.name for path in EXAMPLES}


def test_a_place_that_does_not_exist_has_no_schema() -> None:
    assert find_schema(("spec", "nope")) is None
    assert find_schema(("spec", "training", "steps", "x")) is None
    assert find_schema(("spec", "environment", "rewards", 3, "arguments", "a", "b")) is not None


def test_a_description_is_sentences_without_the_line_breaks_of_the_source() -> None:
    texts = [field.schema["description"] for field in all_fields()]
    assert [text for text in texts if "\n" in text or "  " in text] == []
    assert "\\n" not in (ROOT / "crds/orbitruns.orbitrl.dev.yaml").read_text(encoding="utf-8")
