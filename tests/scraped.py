"""What each process of a cluster counts, read from its /metrics."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from shell.telemetry.metric import Process
from tandem.client import Client

_TIMEOUT_S = 10.0


def fetch(url: str) -> bytes:
    """The body of an answer over loopback."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        body = answer.read()
    assert isinstance(body, bytes)
    return body


def targets(client: Client) -> list[dict[str, Any]]:
    """Whom the router tells Prometheus to scrape."""
    found = json.loads(fetch(f"http://{client.status().admin_address}/targets"))
    assert isinstance(found, list)
    return found


def expositions(client: Client) -> dict[Process, str]:
    """Each role's metrics; of several processes of a role, the last one's."""
    return {
        Process(target["labels"]["role"]): fetch(f"http://{target['targets'][0]}/metrics").decode()
        for target in targets(client)
    }


def counted(exposition: str, name: str, **labels: str) -> float:
    """The one sample of this name and these labels."""
    (found,) = _values(exposition, name, labels)
    return found


def total(exposition: str, name: str, **labels: str) -> float:
    """The sum of the samples of this name that have these labels, of which there may be none."""
    return sum(_values(exposition, name, labels))


def _values(exposition: str, name: str, labels: Mapping[str, str]) -> list[float]:
    return [
        float(sample.value)
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
