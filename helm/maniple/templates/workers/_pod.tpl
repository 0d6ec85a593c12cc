{{- /*
The pod of a group, of a StatefulSet or of a LeaderWorkerSet: dict "root" $ "name" of the group "group" its values.
All ranks of a node are in one container: they reach each other's GPU memory, and their loopback is no mesh's business.
*/ -}}
{{- define "maniple.workerPod" -}}
{{- $root := .root }}
{{- $group := .group }}
{{- $model := $root.Values.model }}
{{- $here := int (include "maniple.ranksHere" $group) }}
{{- $plaintext := eq $root.Values.tls.workers "none" }}
{{- $shares := gt $here 1 }}
{{- $memory := int (include "maniple.mebibytes" $group.resources.memory) }}
{{- $fetches := or (eq $model.source "demo") (eq $model.source "hub") }}
{{- $probePorts := list }}
{{- range $rank := until $here }}{{ $probePorts = append $probePorts (add 50261 $rank) }}{{ $probePorts = append $probePorts (add 9100 $rank) }}{{ end }}
metadata:
  labels:
    {{- include "maniple.labels" $root | nindent 4 }}
    app.kubernetes.io/component: worker
    maniple.io/group: {{ .name }}
    {{- include "maniple.meshLabels" (dict "root" $root "inject" (eq (int $group.nodes) 1)) | nindent 4 }}
  annotations:
    kubectl.kubernetes.io/default-container: worker
    {{- include "maniple.meshAnnotations" (dict "root" $root "inject" (eq (int $group.nodes) 1) "skip" $probePorts) | nindent 4 }}
    {{- with $group.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "maniple.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    {{- include "maniple.podSecurity" $root | nindent 4 }}
  terminationGracePeriodSeconds: 30
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $group.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if $fetches }}
  initContainers:
    - name: fetch-model
      image: {{ include "maniple.image" (dict "root" $root "image" $root.Values.image.worker "suffix" (ternary "-cuda" "" (eq $group.device "cuda"))) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [maniple, model, fetch, {{ ternary "demo" $model.hub.id (eq $model.source "demo") | quote }}]
      args: [--to, {{ include "maniple.modelPath" $root | quote }}{{ if eq $model.source "hub" }}, --revision, {{ $model.hub.revision | quote }}{{ end }}]
      env:
        - {name: MANIPLE_CACHE, value: /models/.cache}
        - {name: HF_HOME, value: /models/.hub}
        {{- with $model.hub.tokenSecret }}
        {{- if .name }}
        - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}}
        {{- end }}
        {{- end }}
      resources:
        requests: {cpu: "1", memory: 1Gi}
        limits: {memory: {{ $group.resources.memory }}}
      securityContext:
        {{- include "maniple.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: /models}
        - {name: tmp, mountPath: /tmp}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "maniple.image" (dict "root" $root "image" $root.Values.image.worker "suffix" (ternary "-cuda" "" (eq $group.device "cuda"))) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - worker
        {{- range $group.args }}
        - {{ . | quote }}
        {{- end }}
      env:
        - {name: MANIPLE_WORKER_LISTEN, value: "0.0.0.0:50061"}
        - {name: MANIPLE_WORKER_HEALTH_LISTEN, value: "0.0.0.0:50161"}
        - {name: MANIPLE_WORKER_PROBE_LISTEN, value: "0.0.0.0:50261"}
        - {name: MANIPLE_WORKER_METRICS_LISTEN, value: "0.0.0.0:9100"}
        - {name: MANIPLE_WORKER_DEVICE, value: {{ $group.device }}}
        - {name: MANIPLE_WORKER_TENSOR_PARALLEL_SIZE, value: {{ $here | quote }}}
        - {name: MANIPLE_WORKER_WORLD_SIZE, value: {{ $group.tensorParallelSize | int | quote }}}
        {{- if gt (int $group.nodes) 1 }}
        # Of LeaderWorkerSet's LWS_WORKER_INDEX, which only containers have: their order in the group.
        - {name: MANIPLE_WORKER_NODE_RANK, value: "$(LWS_WORKER_INDEX)"}
        {{- end }}
        - {name: MANIPLE_WORKER_ORPHAN_GRACE_S, value: {{ $group.orphanGraceSeconds | int | quote }}}
        - {name: MANIPLE_WORKER_LOG_FORMAT, value: json}
        - {name: HOME, value: /tmp}
        - {name: MANIPLE_CACHE, value: /tmp/cache}
        - {name: NUMBA_CACHE_DIR, value: /tmp/cache/numba}
        - {name: TRITON_CACHE_DIR, value: /tmp/cache/triton}
        {{- if $plaintext }}
        - {name: MANIPLE_WORKER_ALLOW_PLAINTEXT_LISTEN, value: "true"}
        - {name: MANIPLE_WORKER_ALLOW_PLAINTEXT_SNAPSHOT, value: "true"}
        {{- else }}
        - {name: MANIPLE_WORKER_TLS_CERTIFICATE, value: /etc/maniple/rank-tls/tls.crt}
        - {name: MANIPLE_WORKER_TLS_KEY, value: /etc/maniple/rank-tls/tls.key}
        - {name: MANIPLE_WORKER_TLS_CLIENT_CA, value: /etc/maniple/rank-tls/ca.crt}
        - {name: MANIPLE_WORKER_TLS_CLIENT_NAMES, value: {{ include "maniple.planeCertificateName" $root | quote }}}
        {{- end }}
        {{- with $group.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range $rank := until $here }}
        - {name: grpc-rank-{{ $rank }}, containerPort: {{ add 50061 $rank }}}
        - {name: grpc-health-{{ $rank }}, containerPort: {{ add 50161 $rank }}}
        - {name: grpc-probe-{{ $rank }}, containerPort: {{ add 50261 $rank }}}
        - {name: http-metrics-{{ $rank }}, containerPort: {{ add 9100 $rank }}}
        {{- end }}
      resources:
        requests:
          cpu: {{ $group.resources.cpu | quote }}
          memory: {{ $group.resources.memory }}
        limits:
          memory: {{ printf "%dMi" (add $memory (ternary (include "maniple.mebibytes" $group.shm | int) 0 $shares)) }}
          {{- if and (eq $group.device "cuda") (not $group.resourceClaims) }}
          {{ $group.resources.gpu }}: {{ $here | quote }}
          {{- end }}
        {{- if $group.resourceClaims }}
        claims:
          {{- range $group.resourceClaims }}
          - {name: {{ .name }}}
          {{- end }}
        {{- end }}
      securityContext:
        {{- include "maniple.containerSecurity" $root | nindent 8 }}
      # The supervisor ends when any rank does, so one rank speaks for all. A rank that failed is NOT_SERVING first.
      startupProbe:
        grpc: {port: 50261}
        {{- include "maniple.startupProbe" $root | nindent 8 }}
      livenessProbe:
        grpc: {port: 50261}
        {{- include "maniple.probe" $root | nindent 8 }}
      readinessProbe:
        grpc: {port: 50261, service: maniple.v1.WorkerService}
        {{- include "maniple.probe" $root | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: models, mountPath: /models, readOnly: true}
        {{- if $shares }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if not $plaintext }}
        - {name: rank-tls, mountPath: /etc/maniple/rank-tls, readOnly: true}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {sizeLimit: 4Gi}}
    {{- if eq $model.source "pvc" }}
    - {name: models, persistentVolumeClaim: {claimName: {{ $model.pvc.claimName }}, readOnly: true}}
    {{- else if eq $model.source "image" }}
    - {name: models, image: {reference: {{ $model.image.reference | quote }}, pullPolicy: {{ $root.Values.image.pullPolicy }}}}
    {{- else if $model.cache.claimName }}
    - {name: models, persistentVolumeClaim: {claimName: {{ $model.cache.claimName }}}}
    {{- else }}
    - {name: models, emptyDir: {sizeLimit: {{ $model.cache.size }}}}
    {{- end }}
    {{- if $shares }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $group.shm }}}}
    {{- end }}
    {{- if not $plaintext }}
    - {name: rank-tls, secret: {secretName: {{ include "maniple.rankSecret" (dict "root" $root "of" "worker") }}, defaultMode: 0440}}
    {{- end }}
  {{- with $group.resourceClaims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
