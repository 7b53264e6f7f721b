"""Makes the chart's templates of the kustomize base and its elastic workers: `--write` renews them. Wants `kubectl`.

What kustomize renders stays as it is but for the places that values fill; a role without replicas is left out.
Templates keep to what Go's text/template has by itself, none of Helm's further functions: so kubectl, which has the
same engine, renders them in tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "deploy/helm"
TEMPLATES = SOURCE / "tandem/templates"
HEADER = "# Made from deploy/base and components/elastic by `python .ci/checks/helm_chart.py --write`.\n"
ROLES = ("prefill", "decode", "elastic")
_HASH = re.compile(r"-[a-z0-9]{10}$")
_PLACE = re.compile(r"^( *)(?:- )?'?<<(\w+)>>'?(?:: null)?$", re.MULTILINE)
_INLINE = re.compile(r"'?\[\[(.*?)\]\]'?")

Manifest = dict[str, Any]

BLOCKS = {
    "resources": """resources:
{{- range $kind, $amounts := .Values.ROLE.resources }}
  {{ $kind }}:
  {{- range $name, $amount := $amounts }}
    {{ $name }}: {{ QUOTED $amount }}
  {{- end }}
{{- end }}""",
    "options": """{{- range $name, $value := .Values.ROLE.options }}
- name: {{ $name }}
  value: {{ QUOTED $value }}
{{- end }}""",
    "env": """{{- if .Values.ROLE.options }}
env:
{{- range $name, $value := .Values.ROLE.options }}
- name: {{ $name }}
  value: {{ QUOTED $value }}
{{- end }}
{{- end }}""",
    "pod": """{{- if .Values.imagePullSecrets }}
imagePullSecrets:
{{- range .Values.imagePullSecrets }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- if .Values.ROLE.nodeSelector }}
nodeSelector:
{{- range $name, $value := .Values.ROLE.nodeSelector }}
  {{ $name }}: {{ QUOTED $value }}
{{- end }}
{{- end }}
{{- if .Values.ROLE.tolerations }}
tolerations:
{{- range .Values.ROLE.tolerations }}
-
{{- range $name, $value := . }}
  {{ $name }}: {{ QUOTED $value }}
{{- end }}
{{- end }}
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
    "end": "{{- end }}",
}
"""What stands where a value is more than a word; `ROLE` is the workload's, `QUOTED` makes a text of any value."""


def templates() -> dict[str, str]:
    """File name → text, one for each kind."""
    done = subprocess.run(["kubectl", "kustomize", str(SOURCE)], capture_output=True, text=True, check=True, timeout=60)
    files: dict[str, list[str]] = {}
    for manifest in yaml.safe_load_all(done.stdout):
        files.setdefault(f"{manifest['kind'].lower()}s.yaml", []).append(_template(manifest))
    return {name: HEADER + "---\n".join(parts) for name, parts in files.items()}


def main() -> int:
    """0 if the templates are true."""
    made = templates()
    if "--write" in sys.argv:
        for name, text in made.items():
            (TEMPLATES / name).write_text(text)
    elif {file.name: file.read_text() for file in TEMPLATES.iterdir()} != made:
        print("deploy/helm is stale; run python .ci/checks/helm_chart.py --write")
        return 1
    return 0


def _template(manifest: Manifest) -> str:
    manifest["metadata"]["namespace"] = "[[ .Release.Namespace ]]"
    if manifest["kind"] == "Deployment":
        _deployment(manifest)
    if manifest["kind"] == "ConfigMap":
        manifest["metadata"]["name"] = name = _HASH.sub("", manifest["metadata"]["name"])
        data = {"<<insecure>>": None, **manifest["data"], "<<end>>": None}
        manifest["data"] = data if name.endswith("security") else {"<<common>>": None}
    text = yaml.safe_dump(manifest, sort_keys=False, width=1000)
    role = manifest["metadata"]["name"].removeprefix("tandem-")
    text = _INLINE.sub(r"{{\1}}", _PLACE.sub(lambda found: _block(found, role), text))
    # The Service and the policy of decode workers are the elastic ones' too.
    if role not in ROLES or (role == "decode" and manifest["kind"] in {"Service", "NetworkPolicy"}):
        return text
    return f"{{{{- if .Values.{role}.replicas }}}}\n{text}{{{{- end }}}}\n"


def _block(found: re.Match[str], role: str) -> str:
    """A block in its place, each line as deep as the place was."""
    text = re.sub(r"QUOTED (\S+)", r'printf "%v" \1 | printf "%q"', BLOCKS[found[2]].replace("ROLE", role))
    return "\n".join(f"{found[1]}{line}" for line in text.splitlines())


def _deployment(manifest: Manifest) -> None:
    role = manifest["metadata"]["name"].removeprefix("tandem-")
    values = f".Values.{role}"
    spec = manifest["spec"]
    spec["replicas"] = f"[[ {values}.replicas ]]"
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
    pod["volumes"] = [each for each in pod["volumes"] if each["name"] != "model"] + ["<<model>>"]
    pod["<<pod>>"] = None


if __name__ == "__main__":
    sys.exit(main())
