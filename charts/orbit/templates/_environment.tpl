{{- /* The operator's settings: one variable each, named in orbit_operator/settings.py. */}}
{{- define "orbit.operatorEnvironment" -}}
{{- $settings := dict
  "NAMESPACES" (join "," (include "orbit.namespaces" . | fromJson).names)
  "RUNTIME_IMAGE" (include "orbit.image" (dict "root" $ "image" .Values.runs.image))
  "ENGINE_IMAGE" .Values.runs.engineImage
  "IMAGE_PULL_POLICY" .Values.runs.imagePullPolicy
  "IMAGE_PULL_SECRETS" (include "orbit.pullSecrets" .Values.runs.imagePullSecrets)
  "RUN_CPU" (int64 .Values.runs.cpu)
  "RUN_CPU_PER_GPU" .Values.runs.cpuRequestPerGPU
  "RUN_MEMORY" .Values.runs.memory
  "RUN_NODE_SELECTOR" (toJson .Values.runs.nodeSelector)
  "RUN_TOLERATIONS" (toJson .Values.runs.tolerations)
  "RUN_EGRESS" (toJson .Values.runs.egress)
  "RUN_ENV" (toJson .Values.runs.env)
  "RUN_CA_CONFIG_MAP" .Values.runs.caConfigMap
  "RUN_AS_USER" (.Values.runs.runAsUser | default -1 | int64)
  "RUN_PRIORITY_CLASS" .Values.runs.priorityClassName
  "RUN_QUEUE" .Values.runs.queueName
  "RUN_POD" (toJson .Values.runs.pod)
  "RUN_POD_LABELS" (toJson .Values.runs.podLabels)
  "RUN_POD_ANNOTATIONS" (toJson .Values.runs.podAnnotations)
  "METRICS_PORT" 8080
  "HEALTH_PORT" 8081
  "LOG_LEVEL" .Values.operator.logLevel
  "WORKERS" (int64 .Values.operator.workers)
  "POLL_SECONDS" .Values.operator.pollSeconds
  "POLL_CONNECTIONS" (int64 .Values.operator.pollConnections)
  "PROGRESS_SECONDS" .Values.operator.progressSeconds
  "RESYNC_SECONDS" .Values.operator.resyncSeconds
  "NODE_LOST_SECONDS" .Values.operator.nodeLostSeconds
  "TTL_SECONDS" (int64 .Values.runs.ttlSecondsAfterFinished)
  "NETWORK_POLICIES" .Values.networkPolicy.enabled
  "DNS_PORTS" (join "," .Values.networkPolicy.dnsPorts)
  "HTTPS_CIDRS" (join "," .Values.networkPolicy.httpsCIDRs)
  "SCRAPE_NAMESPACES" (join "," .Values.networkPolicy.scrapeNamespaces)
  "LEASE_NAME" (include "orbit.operatorName" .)
  "LEASE_SECONDS" .Values.operator.leaseSeconds
  "CLUSTER_DOMAIN" .Values.operator.clusterDomain
-}}
- name: ORBIT_OPERATOR_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: ORBIT_OPERATOR_IDENTITY
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- range $name, $value := $settings }}
- name: ORBIT_OPERATOR_{{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}
