"""Grafana's dashboard JSON from a table of panels.

Belongs here: layout and defaults that all panels share. Does not belong here: any query (`dashboards`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
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
    """If empty, what the series that it asks for are described by."""
    run_link: str = ""
    """Address that the names of a table's runs lead to."""


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
    num_open: int
    """Number of rows that are open at first."""


def render_dashboard(dashboard: Dashboard, helps: Mapping[str, str]) -> dict[str, Any]:
    """The object that Grafana imports. Args: helps: series → what it is."""
    matchers = ", ".join(
        f'{v.name}=~"${v.name}"' if v.is_multi else f'{v.name}="${v.name}"' for v in dashboard.variables
    )
    panels: list[dict[str, Any]] = []
    y, ids = 0, count(1)
    for index, (title, row) in enumerate(dashboard.rows.items()):
        is_open = index < dashboard.num_open
        # Those of a closed row stand within it, and the next row directly below it.
        inside: list[dict[str, Any]] = []
        panels.append({"id": next(ids), "type": "row", "title": title, "collapsed": not is_open,
                       "panels": [] if is_open else inside,
                       "gridPos": {"h": 1, "w": _WIDTH, "x": 0, "y": y}})  # fmt: skip
        below, x, height = y + 1, 0, 0
        for panel in row:
            if x + panel.width > _WIDTH:
                x, below, height = 0, below + height, 0
            grid = {"h": _HEIGHTS[panel.style], "w": panel.width, "x": x, "y": below}
            inside.append({"id": next(ids), "gridPos": grid, **_panel(panel, matchers, helps)})
            x, height = x + panel.width, max(height, grid["h"])
        panels += inside if is_open else []
        y = below + height if is_open else y + 1
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


def all_panels(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The panels of Grafana's object, those of closed rows too."""
    return [each for panel in dashboard["panels"] for each in (panel, *panel.get("panels", ()))]


def _panel(panel: Panel, matchers: str, helps: Mapping[str, str]) -> dict[str, Any]:
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
    named = dict.fromkeys(re.findall(r"orbit_\w+?(?=_bucket|\b)", " ".join(panel.queries.values())))
    made["description"] = panel.text or " ".join(dict.fromkeys(helps[name] for name in named if name in helps))
    if panel.run_link:
        link = {"id": "links", "value": [{"title": "This run", "url": panel.run_link}]}
        made["fieldConfig"]["overrides"] = [{"matcher": {"id": "byName", "options": "run"}, "properties": [link]}]
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
