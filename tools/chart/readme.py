"""The chart's README: a short text, and a table of values made from their comments.

Belongs here: the page. Does not belong here: how to run things (docs/guides/cluster).
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from tools.chart.values_file import Value

_HEAD = """\
<!-- Generated from values.yaml by `python -m tools.chart.generate`; do not edit. -->

# Chart `orbit`

{description}.
Chart {version}, Orbit {app_version}, Kubernetes {kube_version}; installs with Helm 3.18 and later, and Helm 4.

```
helm install orbit charts/orbit --namespace orbit-system --create-namespace \\
  --set image.repository=REGISTRY/orbit-operator --set runs.image.repository=REGISTRY/orbit-runtime
helm test orbit --namespace orbit-system
```

Guides: [install](../../docs/guides/cluster/install.md), [run](../../docs/guides/cluster/run.md),
[operations](../../docs/guides/cluster/operations.md), [security](../../docs/guides/cluster/security.md),
[upgrade](../../docs/guides/cluster/upgrade.md).

The chart installs the operator (Deployment, one replica, *restricted* pod security), the CRD (kept at uninstall), a
Role and a RoleBinding for each watched namespace without any verb on secrets, NetworkPolicies, a Service for
`/metrics` and a PodDisruptionBudget; optionally also a ServiceMonitor, a PodMonitor, a PrometheusRule and two Grafana
dashboards.

# Values

A key that is not listed here is refused.
"""


def render_readme(chart: dict[str, Any], values: list[Value]) -> str:
    """`charts/orbit/README.md`."""
    text = _HEAD.format(
        description=chart["description"],
        version=chart["version"],
        app_version=chart["appVersion"],
        kube_version=chart["kubeVersion"].removeprefix(">=").removesuffix("-0") + " and later",
    )
    for section, rows in groupby(values, key=lambda value: value.section):
        text += f"\n## {section}\n\n| value | default | |\n|---|---|---|\n"
        text += "".join(f"| `{row.path}` | `{_shown(row.default)}` | {row.text} |\n" for row in rows)
    return text


def _shown(default: Any) -> str:
    return json.dumps(default, ensure_ascii=False)
