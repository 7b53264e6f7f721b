{{- /* A value of any shape as YAML in its flow form: JSON, but for the commas behind the last of a list or map. */ -}}
{{- define "tandem.value" -}}
{{- $type := printf "%T" . -}}
{{- if eq $type "map[string]interface {}" -}}
{ {{- range $name, $value := . }}{{ printf "%q" $name }}: {{ template "tandem.value" $value }}, {{ end -}} }
{{- else if eq $type "[]interface {}" -}}
[ {{- range . }}{{ template "tandem.value" . }}, {{ end -}} ]
{{- else if eq $type "string" -}}
{{ printf "%q" . }}
{{- else if eq $type "<nil>" -}}
null
{{- else -}}
{{ . }}
{{- end -}}
{{- end -}}
