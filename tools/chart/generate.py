"""Writes what is made for the Helm chart: `python -m tools.chart.generate`, with `--check` only compares.

Belongs here: which file is made from what. Does not belong here: their content.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tools.chart.crd_template import render_crd_template
from tools.chart.dashboards import DASHBOARDS, build_dashboard
from tools.chart.readme import render_readme
from tools.chart.schema import build_schema
from tools.chart.values_file import read_values
from tools.reference.generate import write_pages

CRD = "crds/orbitruns.orbitrl.dev.yaml"
CHART = "charts/orbit"


def render_all(root: Path) -> dict[str, str]:
    """Path from the repository's root → content."""
    values = read_values((root / CHART / "values.yaml").read_text(encoding="utf-8"))
    chart = YAML(typ="safe").load(root / CHART / "Chart.yaml")
    files = {
        f"{CHART}/README.md": render_readme(chart, values),
        f"{CHART}/values.schema.json": _json(build_schema(values)),
        f"{CHART}/templates/crd.yaml": render_crd_template((root / CRD).read_text(encoding="utf-8")),
    }
    for dashboard in DASHBOARDS:
        files[f"{CHART}/files/dashboards/{dashboard.name}.json"] = _json(build_dashboard(dashboard))
    return files


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    repository = Path(__file__).resolve().parents[2]
    sys.exit(write_pages(render_all(repository), sys.argv[1:], repository))
