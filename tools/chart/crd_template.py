"""The CRD as a template of the chart, so that `helm upgrade` upgrades it, and `helm uninstall` keeps it.

Belongs here: what the chart adds to the CRD. Does not belong here: the CRD (`tools.reference`).
"""

from __future__ import annotations

_GUARD = """\
{{- /* Generated from crds/ by `python -m tools.chart.generate`; do not edit. */}}
{{- if .Values.crds.install }}
"""
_LABELS = '  labels: {{- include "orbit.labels" (dict "root" $ "component" "crd") | nindent 4 }}\n'
_KEEP = "    helm.sh/resource-policy: keep\n"


def render_crd_template(crd: str) -> str:
    """`templates/crd.yaml` from the text of the file in `crds/`.

    Raises:
        ValueError: the file does not look as expected.
    """
    lines = [line.replace("{{", '{{ "{{" }}') for line in crd.splitlines(keepends=True) if not line.startswith("#")]
    start = lines.index("metadata:\n") + 1
    end = next(index for index in range(start, len(lines)) if not lines[index].startswith(" "))
    if "  labels:\n" in lines[start:end]:
        raise ValueError("crds/: the chart adds labels, and the CRD has some already")
    if "  annotations:\n" in lines[start:end]:
        lines.insert(lines.index("  annotations:\n", start) + 1, _KEEP)
    else:
        lines[start:start] = ["  annotations:\n", _KEEP]
    lines.insert(start, _LABELS)
    return _GUARD + "".join(lines) + "{{- end }}\n"
