"""Grafana's dashboard JSON from a table of panels.

Belongs here: layout and defaults that all panels share. Does not belong here: any query (`dashboards`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Style = Literal["stat", "line", "stack", "table", "state"]

SCHEMA_VERSION = 39
"""Grafana 10.4, which later ones read."""
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHTS = 24, {"stat": 4, "table": 9, "state": 8, "line": 8, "stack": 8}
_TYPES = {"stat": "stat", "table": "table", "state": "state-timeline", "line": "timeseries", "stack": "timeseries"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `queries` maps a legend to PromQL, in which `@` stands for the dashboard's variables as matchers."""

    title: str
    style: Style
    queries: Mapping[str, str]
    unit: str = "none"
    width: int = 6
    text: str = ""


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of the dashboard, filled from a label. All variables but the data source are matchers."""

    name: str
    query: str
    is_multi: bool = False


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Rows of panels by title."""

    name: str
    uid: str
    title: str
    variables: tuple[Variable, ...]
    rows: Mapping[str, tuple[Panel, ...]]


def render_dashboard(dashboard: Dashboard) -> dict[str, Any]:
    """The object that Grafana imports."""
    matchers = ", ".join(
        f'{v.name}=~"${v.name}"' if v.is_multi else f'{v.name}="${v.name}"' for v in dashboard.variables
    )
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in dashboard.rows.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                       "gridPos": {"h": 1, "w": _WIDTH, "x": 0, "y": y}})  # fmt: skip
        y += 1
        x = height = 0
        for panel in row:
            if x + panel.width > _WIDTH:
                x, y, height = 0, y + height, 0
            grid = {"h": _HEIGHTS[panel.style], "w": panel.width, "x": x, "y": y}
            panels.append({"id": len(panels) + 1, "gridPos": grid, **_panel(panel, matchers)})
            x, height = x + panel.width, max(height, grid["h"])
        y += height
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["orbit"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_datasource(), *(_variable(variable) for variable in dashboard.variables)]},
        "panels": panels,
    }


def _panel(panel: Panel, matchers: str) -> dict[str, Any]:
    instant = panel.style in ("stat", "table")
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _DATASOURCE,
            "expr": query.replace("@", matchers),
            "legendFormat": legend or "__auto",
            "instant": instant,
            "range": not instant,
            **({"format": "table"} if panel.style == "table" else {}),
        }
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    custom: dict[str, Any] = {}
    if panel.style == "stack":
        custom = {"stacking": {"mode": "normal"}, "fillOpacity": 30, "lineWidth": 1}
    made: dict[str, Any] = {
        "type": _TYPES[panel.style],
        "title": panel.title,
        "datasource": _DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {},
    }
    if panel.text:
        made["description"] = panel.text
    if panel.style == "table":
        hidden = {"Time": True, "Value": True}
        made["transformations"] = [{"id": "organize", "options": {"excludeByName": hidden}}]
    return made


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}


def _variable(variable: Variable) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": variable.name,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": variable.query, "refId": variable.name},
        "definition": variable.query,
        "refresh": 2,
        "sort": 1,
        "multi": variable.is_multi,
        "includeAll": variable.is_multi,
    }
    if variable.is_multi:
        made |= {"allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return made
