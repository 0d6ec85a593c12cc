{{- /* Names, labels, and the sums and choices that several templates share. */ -}}

{{- define "maniple.name" -}}
{{- if contains "maniple" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-maniple" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "maniple.labels" -}}
app.kubernetes.io/name: maniple
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* What selects the pods of a component: dict "root" $ "component" "control-plane". */ -}}
{{- define "maniple.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .group }}
maniple.io/group: {{ . }}
{{- end }}
{{- end }}

{{- /* Groups with everything that `workers` gives them, as JSON. */ -}}
{{- define "maniple.groups" -}}
{{- $groups := dict }}
{{- range $name, $own := .Values.groups }}
{{- $_ := set $groups $name (mergeOverwrite (deepCopy $.Values.workers) (deepCopy (default dict $own))) }}
{{- end }}
{{- toJson $groups }}
{{- end }}

{{- define "maniple.image" -}}
{{- $image := .image -}}
{{- if $image.digest }}{{ printf "%s@%s" $image.repository $image.digest }}{{ else }}{{ printf "%s:%s%s" $image.repository (default .root.Chart.AppVersion .root.Values.image.tag) (default "" .suffix) }}{{ end }}
{{- end }}

{{- /* The directory of the model as workers see it. */ -}}
{{- define "maniple.modelPath" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "pvc" }}{{ printf "/models/%s" (trimPrefix "/" $model.pvc.path) | trimSuffix "/" }}
{{- else if eq $model.source "image" }}{{ printf "/models/%s" (trimPrefix "/" $model.image.path) | trimSuffix "/" }}
{{- else if eq $model.source "hub" }}{{ printf "/models/%s" ($model.hub.id | lower | replace "/" "--") }}
{{- else }}/models/demo
{{- end }}
{{- end }}

{{- define "maniple.modelName" -}}
{{- default (default "demo" (base (include "maniple.modelPath" .))) .Values.model.name }}
{{- end }}

{{- /* Where the ranks of all groups are: groups parted by semicolons, found by the headless Service of each. */ -}}
{{- define "maniple.workerAddresses" -}}
{{- $addresses := list }}
{{- range $name, $group := (include "maniple.groups" . | fromJson) }}
{{- $addresses = append $addresses (printf "dns:///%s-%s.%s.svc:50061" (include "maniple.name" $) $name $.Release.Namespace) }}
{{- end }}
{{- join ";" $addresses }}
{{- end }}

{{- define "maniple.tensorParallelSize" -}}
{{- $size := 0 }}
{{- range $name, $group := (include "maniple.groups" . | fromJson) }}
{{- $own := int $group.tensorParallelSize }}
{{- if and $size (ne $size $own) }}{{ fail (printf "groups.%s.tensorParallelSize=%d: must be %d as in the other groups: a control plane forms groups of one size" $name $own $size) }}{{ end }}
{{- $size = $own }}
{{- end }}
{{- $size }}
{{- end }}

{{- define "maniple.numGroups" -}}
{{- len (include "maniple.groups" . | fromJson) }}
{{- end }}

{{- /* Enough control planes to own every group, and the spares. */ -}}
{{- define "maniple.replicas" -}}
{{- $groups := int (include "maniple.numGroups" .) }}
{{- $each := int .Values.controlPlane.maxGroups }}
{{- add (div (sub (add $groups $each) 1) $each) (int .Values.controlPlane.spares) }}
{{- end }}

{{- /* SIGTERM comes after preStop; the drain is over before the kubelet kills. */ -}}
{{- define "maniple.graceSeconds" -}}
{{- add (int .Values.controlPlane.preStopSeconds) (int .Values.controlPlane.drainSeconds) 10 }}
{{- end }}

{{- define "maniple.startupProbe" -}}
periodSeconds: {{ .Values.probes.periodSeconds }}
timeoutSeconds: {{ .Values.probes.timeoutSeconds }}
failureThreshold: {{ div (sub (add (int .Values.startupSeconds) (int .Values.probes.periodSeconds)) 1) (int .Values.probes.periodSeconds) }}
{{- end }}

{{- define "maniple.probe" -}}
periodSeconds: {{ .Values.probes.periodSeconds }}
timeoutSeconds: {{ .Values.probes.timeoutSeconds }}
failureThreshold: {{ .Values.probes.failureThreshold }}
{{- end }}

{{- /* appProtocol of a gRPC port. Linkerd takes `grpc` for opaque TCP; it knows h2c alone. */ -}}
{{- define "maniple.appProtocol" -}}
{{- if eq .Values.mesh "istio" }}
appProtocol: grpc
{{- else if eq .Values.mesh "linkerd" }}
appProtocol: kubernetes.io/h2c
{{- end }}
{{- end }}

{{- /* Labels and annotations of a pod that the mesh looks at: dict "root" $ "inject" bool "skipInbound" list of ports. */ -}}
{{- define "maniple.meshLabels" -}}
{{- if eq .root.Values.mesh "istio" }}
sidecar.istio.io/inject: {{ .inject | quote }}
{{- end }}
{{- end }}

{{- define "maniple.meshAnnotations" -}}
{{- if eq .root.Values.mesh "istio" }}
{{- if .inject }}
proxy.istio.io/config: '{"holdApplicationUntilProxyStarts": true, "terminationDrainDuration": "{{ include "maniple.graceSeconds" .root }}s"}'
traffic.sidecar.istio.io/excludeInboundPorts: {{ join "," .skip | quote }}
{{- end }}
{{- else if eq .root.Values.mesh "linkerd" }}
linkerd.io/inject: {{ ternary "enabled" "disabled" .inject }}
{{- if .inject }}
config.linkerd.io/skip-inbound-ports: {{ join "," .skip | quote }}
config.alpha.linkerd.io/proxy-wait-before-exit-seconds: {{ include "maniple.graceSeconds" .root | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "maniple.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "maniple.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "maniple.serviceAccount" -}}
{{- default (include "maniple.name" .) .Values.serviceAccount.name }}
{{- end }}

{{- /* The secret with the certificate of workers or controlPlane: dict "root" $ "of" "worker". */ -}}
{{- define "maniple.rankSecret" -}}
{{- if eq .root.Values.tls.workers "secret" -}}
{{- required (printf "tls.workersSecret.%s: must name a secret with tls.crt, tls.key and ca.crt, as tls.workers is secret" .of) (get .root.Values.tls.workersSecret .of) }}
{{- else -}}
{{- printf "%s-%s-tls" (include "maniple.name" .root) (kebabcase .of) }}
{{- end }}
{{- end }}

{{- /* The name that certificates of workers are for: they are reached by IP. */ -}}
{{- define "maniple.rankServerName" -}}
{{- printf "%s-workers.%s.svc" (include "maniple.name" .) .Release.Namespace }}
{{- end }}

{{- /* What cannot be, with a sentence. */ -}}
{{- define "maniple.check" -}}
{{- $model := .Values.model }}
{{- if and (eq $model.source "hub") (not $model.hub.id) }}{{ fail "model.hub.id: must name a repository of the hub, as model.source is hub" }}{{ end }}
{{- if and (eq $model.source "pvc") (not $model.pvc.claimName) }}{{ fail "model.pvc.claimName: must name a PersistentVolumeClaim, as model.source is pvc" }}{{ end }}
{{- if and (eq $model.source "image") (not $model.image.reference) }}{{ fail "model.image.reference: must name an image, as model.source is image" }}{{ end }}
{{- if and (eq .Values.tls.workers "none") (eq .Values.mesh "none") (not .Values.networkPolicy.enabled) }}{{ fail "tls.workers=none: needs mesh or networkPolicy.enabled, or whoever reaches a worker commands it" }}{{ end }}
{{- if and (eq .Values.tls.workers "certManager") (not .Values.tls.issuerRef) }}{{ fail "tls.issuerRef: must name an issuer, as tls.workers is certManager" }}{{ end }}
{{- if and .Values.auth.callersSecret (not .Values.auth.relayTokenSecret) }}{{ fail "auth.relayTokenSecret: must be given with auth.callersSecret: control planes pass calls on to each other" }}{{ end }}
{{- if and .Values.auth.callersSecret (not .Values.tls.clientsSecret) }}{{ fail "tls.clientsSecret: must be given with auth.callersSecret: tokens never travel in plaintext" }}{{ end }}
{{- if and .Values.openai.enabled (or .Values.tls.clientsSecret .Values.auth.callersSecret) }}{{ fail "openai.enabled: needs plaintext to the control plane and no callers; put TLS before the gateway" }}{{ end }}
{{- if not (include "maniple.groups" . | fromJson) }}{{ fail "groups: must have at least one" }}{{ end }}
{{- range $name, $group := (include "maniple.groups" . | fromJson) }}
{{- if mod (int $group.tensorParallelSize) (int $group.nodes) }}{{ fail (printf "groups.%s.nodes=%d: must divide tensorParallelSize=%d" $name (int $group.nodes) (int $group.tensorParallelSize)) }}{{ end }}
{{- end }}
{{- end }}

{{- /* A size such as 512Mi, 4Gi or 1Ti in MiB; the schema admits no other units. */ -}}
{{- define "maniple.mebibytes" -}}
{{- if hasSuffix "Ti" . }}{{ mul (trimSuffix "Ti" . | int) 1048576 }}{{ else if hasSuffix "Gi" . }}{{ mul (trimSuffix "Gi" . | int) 1024 }}{{ else }}{{ trimSuffix "Mi" . | int }}{{ end }}
{{- end }}

{{- /* Ranks in one pod of a group: dict of the group. */ -}}
{{- define "maniple.ranksHere" -}}
{{- div (int .tensorParallelSize) (int .nodes) }}
{{- end }}

{{- /* The name in the certificate that control planes show to workers, and that workers obey. */ -}}
{{- define "maniple.planeCertificateName" -}}
{{- printf "%s-control-plane.%s.svc" (include "maniple.name" .) .Release.Namespace }}
{{- end }}
