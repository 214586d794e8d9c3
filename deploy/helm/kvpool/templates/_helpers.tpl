{{/* The release's name, and kvpool's unless it is in it already. */}}
{{- define "kvpool.name" -}}
{{- $name := ternary .Release.Name (printf "%s-kvpool" .Release.Name) (contains "kvpool" .Release.Name) -}}
{{- $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Of every object. Takes (list . "metadata" or "node"). */}}
{{- define "kvpool.labels" -}}
{{ include "kvpool.selector" . }}
{{- with index . 0 }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}
{{- end -}}

{{- define "kvpool.selector" -}}
app.kubernetes.io/name: kvpool
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "kvpool.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* The metadata service, as clients and nodes dial it. */}}
{{- define "kvpool.uri" -}}
grpc://{{ include "kvpool.host" . }}:7300
{{- end -}}

{{- define "kvpool.host" -}}
{{ include "kvpool.name" . }}-metadata.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* Settings by the environment. Takes (list "META" settings). */}}
{{- define "kvpool.settings" -}}
{{- $role := index . 0 -}}
{{- range $key, $value := index . 1 }}
- {name: KVPOOL_{{ $role }}__{{ upper $key }}, value: {{ (kindIs "string" $value) | ternary $value (toJson $value) | quote }}}
{{- end }}
{{- end -}}

{{/* How a role listens. With tls, `insecure` is about the pages of health and metrics alone: the rest has TLS. */}}
{{- define "kvpool.listen" -}}
{{- $role := index . 0 -}}
{{- $values := (index . 1).Values -}}
- {name: KVPOOL_{{ $role }}__LISTEN, value: 0.0.0.0}
{{- if $values.metrics.enabled }}
- {name: KVPOOL_{{ $role }}__HTTP_LISTEN, value: 0.0.0.0}
{{- end }}
{{- if or $values.metrics.enabled (not $values.tls.enabled) }}
- {name: KVPOOL_{{ $role }}__INSECURE, value: "true"}
{{- end }}
{{- if $values.tls.enabled }}
- {name: KVPOOL_TLS__DIR, value: /etc/kvpool/certs}
{{- end }}
{{- end -}}

{{/* Takes (list . path). Where the pages are for the pod alone, the image's own check asks for them. */}}
{{- define "kvpool.probe" -}}
{{- if (index . 0).Values.metrics.enabled -}}
httpGet: {path: {{ index . 1 }}, port: http}
{{- else -}}
exec: {command: [python3, -I, /opt/kvpool/healthy.py, {{ index . 1 }}]}
{{- end }}
periodSeconds: 5
timeoutSeconds: 3
{{- end -}}

{{/* Of every pod. */}}
{{- define "kvpool.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.runAsUser }}
  runAsGroup: {{ .Values.runAsUser }}
  fsGroup: {{ .Values.runAsUser }} # by which it may read its keys
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Where pods run. Takes .Values.metadata or .Values.node. */}}
{{- define "kvpool.scheduling" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $ $key }}
{{ $key }}: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of every container, those that need more aside. */}}
{{- define "kvpool.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* A quantity in Mi; the schema allows Mi, Gi and Ti. */}}
{{- define "kvpool.mebibytes" -}}
{{- $factor := dict "Mi" 1 "Gi" 1024 "Ti" 1048576 -}}
{{- $unit := regexFind "[MGT]i$" . -}}
{{- mul (trimSuffix $unit . | int64) (index $factor $unit) -}}
{{- end -}}

{{/* What a node's container needs: its blocks, a tenth more for their headers, and what it works with. */}}
{{- define "kvpool.nodeMemory" -}}
{{- $size := include "kvpool.mebibytes" .Values.node.size | int64 -}}
{{- add $size (div $size 10) (include "kvpool.mebibytes" .Values.node.memoryOverhead | int64) -}}Mi
{{- end -}}

{{/* RDMA devices, as a resource. */}}
{{- define "kvpool.devices" -}}
{{- if and .Values.node.rdma.enabled .Values.node.rdma.resource -}}
{{ .Values.node.rdma.resource }}: {{ .Values.node.rdma.count }}
{{- end -}}
{{- end -}}

{{/* Who may read health and metrics. Takes (list . port). */}}
{{- define "kvpool.monitoring" -}}
{{- $values := (index . 0).Values -}}
{{- if and $values.metrics.enabled $values.networkPolicy.monitoring -}}
- from: {{- toYaml $values.networkPolicy.monitoring | nindent 4 }}
  ports:
    - {port: {{ index . 1 }}, protocol: TCP}
{{- end -}}
{{- end -}}

{{/* Refuses what the schema cannot. */}}
{{- define "kvpool.check" -}}
{{- with .Values -}}
{{- if and (not .tls.enabled) (not .insecure) -}}
{{- fail "a pool that others reach needs tls.enabled, or insecure: true for one in plaintext without authentication" -}}
{{- end -}}
{{- if and .tls.enabled .insecure -}}
{{- fail "insecure: true and tls.enabled: true: leave one of them out" -}}
{{- end -}}
{{- if and .tls.enabled (not .tls.metadataSecret) -}}
{{- fail "tls.enabled needs tls.metadataSecret: a Secret with ca.pem, meta.pem and meta-key.pem of `kvpool certs`" -}}
{{- end -}}
{{- if and .tls.enabled (eq (empty .tls.nodeHostPath) (empty .tls.nodesSecret)) -}}
{{- fail "tls.enabled needs either tls.nodeHostPath or tls.nodesSecret: where nodes find their certificates" -}}
{{- end -}}
{{- if ne (empty .node.disk.hostPath) (empty .node.disk.size) -}}
{{- fail "node.disk.hostPath and node.disk.size go together" -}}
{{- end -}}
{{- end -}}
{{- end -}}
