{{- /* Everything the operator may do, in one place: Roles and `helm test` are made from it. No verb on secrets. */}}

{{- /* In each watched namespace. */}}
{{- define "orbit.runRules" -}}
- apiGroups: [orbitrl.dev]
  resources: [orbitruns]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [orbitrl.dev]
  resources: [orbitruns/status]
  verbs: [patch]
# Owner references that block deletion, where the cluster checks them.
- apiGroups: [orbitrl.dev]
  resources: [orbitruns/finalizers]
  verbs: [update]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [create, patch]
{{- if .Values.networkPolicy.enabled }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, patch]
{{- end }}
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
# Runs over several nodes; where KubeRay is not installed nobody has such objects.
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, list, create, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list]
# The Lease by which one installation owns the runs of a namespace.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [orbit-runs]
  verbs: [get, update]
{{- end }}

{{- /* In the operator's own namespace. The chart makes the Lease, so that uninstalling removes it. */}}
{{- define "orbit.leaseRules" -}}
# Where a GitOps tool leaves out the chart's Lease (Argo CD), the operator makes it. RBAC limits no `create` to a name.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "orbit.operatorName" . }}]
  verbs: [get, update]
{{- end }}

{{- define "orbit.nodeRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [get]
{{- end }}
