"""Makes the chart's templates of the kustomize base and components: `--write` renews them. Wants `kubectl`.

What kustomize renders stays as it is but for the places that values fill; a role without replicas is left out, and so
are monitoring and autoscalers unless values ask for them. Templates keep to what Go's text/template has by itself, none
of Helm's further functions: so kubectl, which has the same engine, renders them in tests. Values of any shape are
written by the template in `_value.tpl`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "deploy/helm"
TEMPLATES = SOURCE / "tandem/templates"
COMPONENTS = ROOT / "deploy/components"
HEADER = "# Made from deploy/base and deploy/components by `python .ci/checks/helm_chart.py --write`.\n"
ROLES = ("prefill", "decode", "elastic")
AUTOSCALERS = {"HorizontalPodAutoscaler": "hpa", "ScaledObject": "keda"}
MONITORING = ("pod-monitor.yaml", "prometheus-rule.yaml", "network-policy.yaml")
_HASH = re.compile(r"-[a-z0-9]{10}$")
_PLACE = re.compile(r"^( *)(?:- )?'?<<(\w+)>>'?(?:: null)?$", re.MULTILINE)
_INLINE = re.compile(r"'?\[\[(.*?)\]\]'?")

Manifest = dict[str, Any]

_ENV = """{{- range $name, $value := .Values.ROLE.options }}
- name: {{ $name }}
  value: {{ QUOTED $value }}
{{- end }}
{{- range .Values.ROLE.extraEnv }}
- {{ template "tandem.value" . }}
{{- end }}"""
BLOCKS = {
    "replicas": """{{- if not .Values.autoscaling.kind }}
replicas: {{ .Values.ROLE.replicas }}
{{- end }}""",
    "resources": 'resources: {{ template "tandem.value" .Values.ROLE.resources }}',
    "options": _ENV,
    "env": f"{{{{- if or .Values.ROLE.options .Values.ROLE.extraEnv }}}}\nenv:\n{_ENV}\n{{{{- end }}}}",
    "mounts": """{{- range .Values.ROLE.volumeMounts }}
- {{ template "tandem.value" . }}
{{- end }}""",
    "volumes": """{{- range .Values.ROLE.volumes }}
- {{ template "tandem.value" . }}
{{- end }}""",
    "pod": """{{- if .Values.imagePullSecrets }}
imagePullSecrets:
{{- range .Values.imagePullSecrets }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- if .Values.ROLE.nodeSelector }}
nodeSelector: {{ template "tandem.value" .Values.ROLE.nodeSelector }}
{{- end }}
{{- if .Values.ROLE.tolerations }}
tolerations: {{ template "tandem.value" .Values.ROLE.tolerations }}
{{- end }}
{{- if .Values.ROLE.resourceClaims }}
resourceClaims: {{ template "tandem.value" .Values.ROLE.resourceClaims }}
{{- end }}""",
    "optional": """{{- if .Values.insecure }}
optional: true
{{- end }}""",
    "model": """- name: model
{{- if .Values.model.claim }}
  persistentVolumeClaim:
    claimName: {{ .Values.model.claim }}
    readOnly: true
{{- else if .Values.model.image }}
  image:
    reference: {{ .Values.model.image }}
    pullPolicy: IfNotPresent
{{- else }}
  emptyDir: {}
{{- end }}""",
    "common": """{{- range $name, $value := .Values.options }}
{{ $name }}: {{ QUOTED $value }}
{{- end }}""",
    "annotations": """tandem/insecure: {{ QUOTED .Values.insecure }}
{{- range $name, $value := .Values.options }}
tandem/{{ $name }}: {{ QUOTED $value }}
{{- end }}""",
    "insecure": '{{- if .Values.insecure }}\nTANDEM_INSECURE: "true"\n{{- else }}',
    "secure": "{{- if .Values.insecure }}\nscheme: http\n{{- else }}",
    "labels": """{{- if .Values.monitoring.labels }}
labels: {{ template "tandem.value" .Values.monitoring.labels }}
{{- end }}""",
    "end": "{{- end }}",
}
"""What stands where a value is more than a word; `ROLE` is the workload's, `QUOTED` makes a text of any value."""


def templates() -> dict[str, str]:
    """File name → text, one for each kind."""
    done = subprocess.run(["kubectl", "kustomize", str(SOURCE)], capture_output=True, text=True, check=True, timeout=60)
    files: dict[str, list[str]] = {}
    for manifest in (*yaml.safe_load_all(done.stdout), *_optional()):
        files.setdefault(f"{manifest['kind'].lower()}s.yaml", []).append(_template(manifest))
    return {name: HEADER + "---\n".join(parts) for name, parts in files.items()}


def _optional() -> Iterator[Manifest]:
    """What components add as whole files."""
    files = [COMPONENTS / "monitoring" / name for name in MONITORING]
    for folder in ("autoscale-hpa", "autoscale-hpa-elastic", "autoscale-keda", "autoscale-keda-elastic"):
        files += [file for role in ROLES if (file := COMPONENTS / folder / f"{role}.yaml").exists()]
    for file in files:
        yield from yaml.safe_load_all(file.read_text())


def main() -> int:
    """0 if the templates are true."""
    made = templates()
    if "--write" in sys.argv:
        for name, text in made.items():
            (TEMPLATES / name).write_text(text)
    elif {file.name: file.read_text() for file in TEMPLATES.glob("*.yaml")} != made:
        print("deploy/helm is stale; run python .ci/checks/helm_chart.py --write")
        return 1
    return 0


def _template(manifest: Manifest) -> str:
    manifest["metadata"]["namespace"] = "[[ .Release.Namespace ]]"
    match manifest["kind"]:
        case "Deployment":
            _deployment(manifest)
        case "ConfigMap":
            manifest["metadata"]["name"] = name = _HASH.sub("", manifest["metadata"]["name"])
            data = {"<<insecure>>": None, **manifest["data"], "<<end>>": None}
            manifest["data"] = data if name.endswith("security") else {"<<common>>": None}
        case "PodMonitor":
            endpoints = manifest["spec"]["podMetricsEndpoints"]
            manifest["spec"]["podMetricsEndpoints"] = [_endpoint(each) for each in endpoints]
            manifest["metadata"]["<<labels>>"] = None
        case "PrometheusRule":
            manifest["metadata"]["<<labels>>"] = None
        case "HorizontalPodAutoscaler" | "ScaledObject":
            _autoscaler(manifest)
    role = manifest["metadata"]["name"].removeprefix("tandem-")
    text = _dumped(manifest).replace("{{", "{<")  # what Prometheus fills in itself
    text = _INLINE.sub(r"{{\1}}", _PLACE.sub(lambda found: _block(found, role), text)).replace("{<", '{{ "{{" }}')
    condition = _condition(manifest, role)
    return f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n" if condition else text


def _dumped(manifest: Manifest) -> str:
    """Plain data, without YAML's references."""
    return yaml.safe_dump(json.loads(json.dumps(manifest)), sort_keys=False, width=10_000)


def _condition(manifest: Manifest, role: str) -> str:
    """When the object is there; empty = always."""
    kind = manifest["kind"]
    if kind in AUTOSCALERS:
        return f'and .Values.{role}.replicas (eq .Values.autoscaling.kind "{AUTOSCALERS[kind]}")'
    if kind in {"PodMonitor", "PrometheusRule"} or role == "admin":
        return ".Values.monitoring.enabled"
    # The Service and the policy of decode workers are the elastic ones' too.
    if role not in ROLES or (role == "decode" and kind in {"Service", "NetworkPolicy"}):
        return ""
    return f".Values.{role}.replicas"


def _endpoint(endpoint: Manifest) -> Manifest:
    """What is asked without TLS and tokens where there are none."""
    secure = {key: endpoint.pop(key) for key in ("scheme", "tlsConfig", "authorization")}
    return {**endpoint, "<<secure>>": None, **secure, "<<end>>": None}


def _autoscaler(manifest: Manifest) -> None:
    """Bounds and thresholds come from values."""
    spec, values = manifest["spec"], ".Values.autoscaling"
    least, most = ("minReplicas", "maxReplicas") if "minReplicas" in spec else ("minReplicaCount", "maxReplicaCount")
    spec[least], spec[most] = f"[[ {values}.minReplicas ]]", f"[[ {values}.maxReplicas ]]"
    for metric in spec.get("metrics", ()):
        target = metric["pods"]["target"]
        target["averageValue"] = _threshold(metric["pods"]["metric"]["name"])
    for trigger in spec.get("triggers", ()):
        metadata = trigger["metadata"]
        metadata["threshold"] = _threshold(metadata["query"])
        metadata["serverAddress"] = f"[[ {values}.prometheus ]]"
        metadata["query"] = metadata["query"].replace('"tandem"', '"[[ .Release.Namespace ]]"')


def _threshold(metric: str) -> str:
    value = "queuedPromptTokens" if "queued" in metric else "kvPoolUsage"
    return f'[[ printf "%v" .Values.autoscaling.{value} | printf "%q" ]]'


def _block(found: re.Match[str], role: str) -> str:
    """A block in its place, each line as deep as the place was."""
    text = re.sub(r"QUOTED (\S+)", r'printf "%v" \1 | printf "%q"', BLOCKS[found[2]].replace("ROLE", role))
    return "\n".join(f"{found[1]}{line}" for line in text.splitlines())


def _deployment(manifest: Manifest) -> None:
    role = manifest["metadata"]["name"].removeprefix("tandem-")
    values = f".Values.{role}"
    spec = manifest["spec"]
    del spec["replicas"]
    manifest["spec"] = spec = (
        {"<<replicas>>": None, **spec} if role in ROLES else {"replicas": f"[[ {values}.replicas ]]", **spec}
    )
    rolling = spec["strategy"]["rollingUpdate"]
    for name in rolling:
        rolling[name] = f"[[ {values}.{name} ]]"
    # A ConfigMap of the chart keeps its name: the pods roll by this, when options change.
    spec["template"]["metadata"]["annotations"] = {"<<annotations>>": None}
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    image = container["image"].partition(":")[0].removeprefix("tandem-")
    container["image"] = f"[[ .Values.image.{image}.repository ]]:[[ .Values.image.{image}.tag ]]"
    for source in container["envFrom"]:
        source["configMapRef"]["name"] = _HASH.sub("", source["configMapRef"]["name"])
    container["volumeMounts"].append("<<mounts>>")
    if "env" in container:
        container["env"].append("<<options>>")
    for name, probe in container.items():
        if name.endswith("Probe"):
            probe["httpGet"]["scheme"] = "[[ if .Values.insecure ]]HTTP[[ else ]]HTTPS[[ end ]]"
    container.pop("resources")
    pod["containers"] = [container | {"<<resources>>": None} | ({} if "env" in container else {"<<env>>": None})]
    for volume in pod["volumes"]:
        if "secret" in volume:
            volume["secret"]["<<optional>>"] = None
    pod["volumes"] = [each for each in pod["volumes"] if each["name"] != "model"] + ["<<model>>", "<<volumes>>"]
    pod["<<pod>>"] = None


if __name__ == "__main__":
    sys.exit(main())
