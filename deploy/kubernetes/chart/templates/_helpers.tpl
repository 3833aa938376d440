{{- define "muond.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "muond.selector" -}}
app.kubernetes.io/name: muond
app.kubernetes.io/instance: {{ include "muond.name" . }}
{{- end }}

{{- define "muond.labels" -}}
{{ include "muond.selector" . }}
app.kubernetes.io/component: {{ .Values.mode }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: muond
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* What follows a pod's name in its address: trainers of other namespaces get the same one. */}}
{{- define "muond.domain" -}}
{{ include "muond.name" . }}-headless.{{ .Release.Namespace }}.svc:{{ .Values.ports.grpc }}
{{- end }}

{{- define "muond.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Beyond the pod's own loopback only with certificates, or where it is said to be meant so. */}}
{{- define "muond.tcp" -}}
{{- if or .Values.tls.secretName .Values.insecure }}yes{{ end -}}
{{- end }}

{{- define "muond.checkValues" -}}
{{- if and .Values.tls.secretName .Values.insecure }}
{{- fail "insecure: with tls.secretName every TCP address asks for certificates" }}
{{- end }}
{{- if and (eq .Values.mode "statefulset") (not (include "muond.tcp" .)) }}
{{- fail "mode statefulset: daemons and trainers meet over the network: give tls.secretName, or insecure: true" }}
{{- end }}
{{- if and (eq .Values.mode "daemonset") (not .Values.hostSocketDirectory) (not (include "muond.tcp" .)) }}
{{- fail "mode daemonset: no trainer could reach the daemon: give hostSocketDirectory, tls.secretName, or insecure: true" }}
{{- end }}
{{- range $key := list "listen" "peers" "advertise" "peers-expected" "insecure" "metrics-address" "health-address" "tls-cert" "tls-key" "tls-ca" "tls-server-name" }}
{{- if hasKey $.Values.config $key }}
{{- fail (printf "config.%s: the chart sets it" $key) }}
{{- end }}
{{- end }}
{{- end }}

{{/* muond.conf: numbers, true and false bare, lists as arrays, everything else quoted. */}}
{{- define "muond.conf" -}}
listen = [{{ if .Values.hostSocketDirectory }}"unix:///run/muond/muond.sock", {{ end }}"{{ if include "muond.tcp" . }}0.0.0.0{{ else }}127.0.0.1{{ end }}:{{ .Values.ports.grpc }}"]
insecure = {{ .Values.insecure }}
health-address = "0.0.0.0:{{ .Values.ports.health }}"
metrics-address = "0.0.0.0:{{ .Values.ports.metrics }}"
{{- if .Values.tls.secretName }}
tls-cert = "/etc/muond/tls/tls.crt"
tls-key = "/etc/muond/tls/tls.key"
tls-ca = "/etc/muond/tls/ca.crt"
tls-server-name = {{ .Values.tls.serverName | quote }}
{{- end }}
{{- if eq .Values.mode "statefulset" }}
peers = "{{ range $i := until (int .Values.replicas) }}{{ if $i }},{{ end }}{{ include "muond.name" $ }}-{{ $i }}.{{ include "muond.domain" $ }}{{ end }}"
{{- end }}
{{- range $key, $value := .Values.config }}
{{- if kindIs "slice" $value }}
{{ $key }} = [{{ range $i, $v := $value }}{{ if $i }}, {{ end }}{{ $v | quote }}{{ end }}]
{{- else if kindIs "string" $value }}
{{ $key }} = {{ $value | quote }}
{{- else if kindIs "bool" $value }}
{{ $key }} = {{ $value }}
{{- else }}
{{ $key }} = {{ int64 $value }}
{{- end }}
{{- end }}
{{ end }}

{{- define "muond.pod" -}}
metadata:
  labels:
    {{- include "muond.labels" . | nindent 4 }}
    {{- with .Values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    # Another configuration is another pod. With updateStrategy OnDelete it waits for the operator.
    muond.dev/config: {{ include "muond.conf" . | sha256sum | trunc 16 }}
    {{- with .Values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ include "muond.name" . }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
  {{- if eq .Values.gpu.mode "envvar" }}
  runtimeClassName: {{ .Values.gpu.runtimeClassName }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{ toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    seccompProfile:
      type: RuntimeDefault
  {{- if .Values.hostSocketDirectory }}
  initContainers:
    # The kubelet makes the node's folder for root; the daemon is not root.
    - name: socket-directory
      image: {{ include "muond.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [install, -d, -m, "0750", -o, "10001", -g, "10001", /run/muond]
      securityContext:
        runAsNonRoot: false
        runAsUser: 0
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
          add: [CHOWN, FOWNER, DAC_OVERRIDE]
      resources:
        requests: {cpu: 10m, memory: 16Mi}
        limits: {memory: 64Mi}
      volumeMounts:
        - name: socket
          mountPath: /run/muond
  {{- end }}
  containers:
    - name: muond
      image: {{ include "muond.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [--config, /etc/muond/muond.conf]
      env:
        {{- if eq .Values.gpu.mode "envvar" }}
        - name: NVIDIA_VISIBLE_DEVICES
          value: all
        - name: NVIDIA_DRIVER_CAPABILITIES
          value: compute,utility
        {{- end }}
        {{- if eq .Values.mode "statefulset" }}
        # Its own entry among the peers: names stay when a pod comes back with another address.
        - name: POD_NAME
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        - name: MUOND_ADVERTISE
          value: $(POD_NAME).{{ include "muond.domain" . }}
        {{- end }}
        {{- with .Values.extraEnv }}{{ toYaml . | nindent 8 }}{{ end }}
      ports:
        - {name: grpc, containerPort: {{ .Values.ports.grpc }}}
        - {name: health, containerPort: {{ .Values.ports.health }}}
        - {name: metrics, containerPort: {{ .Values.ports.metrics }}}
      startupProbe:
        grpc: {port: {{ .Values.ports.health }}, service: liveness}
        periodSeconds: 5
        failureThreshold: {{ div .Values.startupSeconds 5 }}
      livenessProbe:
        grpc: {port: {{ .Values.ports.health }}, service: liveness}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        grpc: {port: {{ .Values.ports.health }}, service: readiness}
        periodSeconds: 5
        timeoutSeconds: 3
      lifecycle:
        preStop:
          exec:
            command: [sleep, {{ .Values.preStopSeconds | quote }}]
      resources:
        {{- $resources := deepCopy .Values.resources }}
        {{- if eq .Values.gpu.mode "request" }}
        {{- $gpu := dict .Values.gpu.resource (.Values.gpu.count | toString) }}
        {{- $resources = merge $resources (dict "limits" $gpu "requests" $gpu) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      volumeMounts:
        - {name: config, mountPath: /etc/muond/muond.conf, subPath: muond.conf, readOnly: true}
        - {name: shm, mountPath: /dev/shm}
        {{- if .Values.hostSocketDirectory }}
        - {name: socket, mountPath: /run/muond}
        {{- end }}
        {{- if .Values.tls.secretName }}
        # A folder, not subPath: a renewed certificate arrives by itself.
        - {name: tls, mountPath: /etc/muond/tls, readOnly: true}
        {{- end }}
        {{- with .Values.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "muond.name" . }}
    - name: shm
      emptyDir: {medium: Memory}
    {{- if .Values.hostSocketDirectory }}
    - name: socket
      hostPath: {path: {{ .Values.hostSocketDirectory }}, type: DirectoryOrCreate}
    {{- end }}
    {{- with .Values.tls.secretName }}
    - name: tls
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- with .Values.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- if .Values.affinity }}
  affinity: {{ toYaml .Values.affinity | nindent 4 }}
  {{- else if eq .Values.mode "statefulset" }}
  affinity:
    podAntiAffinity:
      # Two daemons on one node would share its GPUs and its network.
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "muond.selector" . | nindent 14 }}
  {{- end }}
{{- end }}
