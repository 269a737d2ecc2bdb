"""The *restricted* pod security standard (Kubernetes 1.34), as a list of what a pod does wrong.

Written from the standard's text, independently of the chart.
"""

from __future__ import annotations

from typing import Any

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_FORBIDDEN = ("hostNetwork", "hostPID", "hostIPC")


def violations(pod: dict[str, Any]) -> list[str]:
    """Violations in a pod's `spec`."""
    found = [name for name in _FORBIDDEN if pod.get(name)]
    for volume in pod.get("volumes", ()):
        found += [f"volume {volume['name']}: {kind}" for kind in set(volume) - VOLUMES - {"name"}]
    context = pod.get("securityContext", {})
    containers = [*pod.get("initContainers", ()), *pod.get("containers", ()), *pod.get("ephemeralContainers", ())]
    for container in containers:
        found += [f"{container['name']}: {problem}" for problem in _container(container, context)]
    return found


def _container(container: dict[str, Any], pod: dict[str, Any]) -> list[str]:
    own = container.get("securityContext", {})
    found = []
    if own.get("privileged"):
        found.append("privileged")
    if own.get("allowPrivilegeEscalation") is not False:
        found.append("allowPrivilegeEscalation is not false")
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        found.append("runAsNonRoot is not true")
    if 0 in (own.get("runAsUser"), pod.get("runAsUser")):
        found.append("runAsUser is 0")
    if "ALL" not in own.get("capabilities", {}).get("drop", ()):
        found.append("capabilities are not dropped")
    found += [f"capability {name}" for name in own.get("capabilities", {}).get("add", ()) if name != "NET_BIND_SERVICE"]
    seccomp = own.get("seccompProfile", pod.get("seccompProfile", {})).get("type")
    if seccomp not in ("RuntimeDefault", "Localhost"):
        found.append(f"seccomp profile {seccomp}")
    found += [f"hostPort {port['hostPort']}" for port in container.get("ports", ()) if port.get("hostPort")]
    return found
