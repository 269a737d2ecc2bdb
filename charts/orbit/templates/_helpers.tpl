{{- define "orbit.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- /* Prefix of names: the release's, and the chart's where the release's does not say it. */}}
{{- define "orbit.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "orbit.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "orbit.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "orbit.operatorName" -}}
{{ include "orbit.fullname" . }}-operator
{{- end }}

{{- define "orbit.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "orbit.operatorName" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- /* Labels of every object. Call with (dict "root" $ "component" "operator"). */}}
{{- define "orbit.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 }}
{{ include "orbit.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: orbit
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- define "orbit.selectorLabels" -}}
app.kubernetes.io/name: {{ include "orbit.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- /* Labels that the operator gives to the pod of every run. */}}
{{- define "orbit.runSelectorLabels" -}}
app.kubernetes.io/name: orbit-run
app.kubernetes.io/managed-by: orbit-operator
{{- end }}

{{- /* Reference of an image. Call with (dict "root" $ "image" .Values.image). */}}
{{- define "orbit.image" -}}
{{- if .image.digest }}
{{- printf "%s@%s" .image.repository .image.digest }}
{{- else }}
{{- printf "%s:%s" .image.repository (default .root.Chart.AppVersion .image.tag) }}
{{- end }}
{{- end }}

{{- /* Names of pull secrets, separated by commas; each is written as a name or as {name: …}. */}}
{{- define "orbit.pullSecrets" -}}
{{- $names := list }}
{{- range . }}
{{- if kindIs "string" . }}
{{- $names = append $names . }}
{{- else }}
{{- $names = append $names .name }}
{{- end }}
{{- end }}
{{- join "," $names }}
{{- end }}

{{- /* Watched namespaces as JSON: {"names": […]}; an empty list is every namespace. */}}
{{- define "orbit.namespaces" -}}
{{- if .Values.clusterScope }}
{{- if .Values.watchNamespaces }}
{{- fail "clusterScope watches every namespace: leave watchNamespaces empty, or set clusterScope to false" }}
{{- end }}
{{- dict "names" (list) | toJson }}
{{- else }}
{{- dict "names" (default (list .Release.Namespace) .Values.watchNamespaces | uniq) | toJson }}
{{- end }}
{{- end }}

{{- /* Fails, with what to do, where the cluster does not serve the Prometheus operator's API. Call with (dict "root" $ "value" "monitoring.x.enabled"). */}}
{{- define "orbit.needsPrometheusOperator" -}}
{{- if not (.root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1") }}
{{- fail (printf "%s needs the Prometheus operator, and this cluster does not serve monitoring.coreos.com/v1: install it first, or set %s to false (with `helm template` add --api-versions monitoring.coreos.com/v1)" .value .value) }}
{{- end }}
{{- end }}

{{- /* Restricted pod security, for every pod of this chart. */}}
{{- define "orbit.podSecurityContext" -}}
runAsNonRoot: true
{{- with .Values.runAsUser }}
runAsUser: {{ int64 . }}
runAsGroup: {{ int64 . }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "orbit.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
