"""The chart's generated files are fresh, and its versions are the package's."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from orbit_runtime import __version__
from tools.chart.crd_template import render_crd_template
from tools.chart.generate import render_all
from tools.chart.schema import build_schema
from tools.chart.values_file import Value, leaves, read_values

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/orbit"


def test_generated_files_are_fresh() -> None:
    stale = [name for name, content in render_all(ROOT).items() if (ROOT / name).read_text() != content]
    assert not stale, f"run `make crds`: {stale}"


def test_the_chart_installs_this_version() -> None:
    chart = YAML(typ="safe").load(CHART / "Chart.yaml")
    assert chart["appVersion"] == __version__
    assert chart["version"] == __version__


def test_the_example_of_the_chart_is_a_good_manifest(tmp_path: Path) -> None:
    from orbit_runtime.spec import load_manifest

    (tmp_path / "run.yaml").write_text(
        YAML(typ="safe").load(CHART / "Chart.yaml")["annotations"]["artifacthub.io/crdsExamples"].replace("- ", "  ", 1)
    )
    assert load_manifest(tmp_path / "run.yaml").name == "quickstart"


def test_every_value_is_documented() -> None:
    source = (CHART / "values.yaml").read_text()
    documented = [value.path for value in read_values(source)]
    for leaf in leaves(YAML(typ="safe").load(source)):
        assert any(leaf == path or leaf.startswith(f"{path}.") for path in documented), leaf


def test_a_value_without_a_comment_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"values.yaml:3: b has no comment"):
        read_values("# First.\na: 1\nb: 2\n")


def test_a_comment_documents_all_below_its_key() -> None:
    (value,) = read_values("# ## Pod\n# What it\n# asks for.\nresources:\n  limits:\n    memory: 1Gi\n")
    assert value == Value("resources", "What it asks for.", {"limits": {"memory": "1Gi"}}, "Pod")


def test_a_list_without_bounds_is_an_error() -> None:
    with pytest.raises(ValueError, match="names needs a row in BOUNDS"):
        build_schema([Value("names", "Some.", [], "")])


def test_braces_in_the_crd_are_no_template() -> None:
    crd = "# head\nkind: X\nmetadata:\n  name: x\nspec:\n  text: a {{ b }}\n"
    assert 'text: a {{ "{{" }} b }}' in render_crd_template(crd)


def test_what_the_crd_says_of_itself_is_kept() -> None:
    made = render_crd_template("metadata:\n  name: x\n  annotations:\n    a/b: c\nspec:\n  x: 1\n")
    assert "  annotations:\n    helm.sh/resource-policy: keep\n    a/b: c\n" in made


def test_a_crd_with_labels_of_its_own_is_an_error() -> None:
    with pytest.raises(ValueError, match="has some already"):
        render_crd_template("metadata:\n  name: x\n  labels:\n    a: b\nspec:\n  x: 1\n")
