"""Thresholds of autoscalers as a kustomize component, to put behind `autoscale-*`: plain text, made without a library.

It knows the order of metrics and triggers in deploy/components/autoscale-*; tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shell.telemetry import metric_names as names
from tandem.errors import ConfigError
from tandem.types import Role

Thresholds = Mapping[str, Mapping[str, float]]
"""Thresholds of a worker, by role and metric."""

_MEASURED: Mapping[Role, tuple[str, ...]] = {
    Role.PREFILL: (names.PREFILL_QUEUED_TOKENS.name,),
    Role.DECODE: (names.POOL_USAGE.name,),
    Role.ELASTIC: (names.POOL_USAGE.name, names.DECODE_QUEUED_TOKENS.name),
}
"""Metrics by role, as in the manifests."""
_HEAD = """# Made by `tandem plan --autoscaler`: what a worker shows on average in the least deployment that passes.
# To be listed behind a component autoscale-*; where one of these autoscalers is missing, its patch does nothing.
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component

patches:
"""


def write_component(folder: Path, thresholds: Thresholds) -> Path:
    """Writes `folder`/kustomization.yaml, and makes the folder if needed. Raises ConfigError."""
    file = folder / "kustomization.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(component(thresholds), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--autoscaler", f"{file}: {error.strerror}") from error
    return file


def component(thresholds: Thresholds) -> str:
    """For HorizontalPodAutoscalers and KEDA's ScaledObjects alike."""
    lines: list[str] = []
    for role, values in thresholds.items():
        quantities = [_quantity(values[metric]) for metric in _MEASURED[Role(role)]]
        for kind, path in (
            ("HorizontalPodAutoscaler", "/spec/metrics/{}/pods/target/averageValue"),
            ("ScaledObject", "/spec/triggers/{}/metadata/threshold"),
        ):
            lines += [f"  - target: {{kind: {kind}, name: tandem-{role}}}", "    patch: |-"]
            lines += [
                f'      - {{op: replace, path: {path.format(number)}, value: "{quantity}"}}'
                for number, quantity in enumerate(quantities)
            ]
    return _HEAD + "\n".join(lines) + "\n"


def _quantity(value: float) -> str:
    """Three decimals, as both kinds read them, and never 0, which both refuse."""
    return f"{max(value, 0.001):.3f}".rstrip("0").rstrip(".")
