"""What the workers of a cluster count, read from their Prometheus pages."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 5.0


def worker_counters(admin_address: str) -> Counter[str]:
    """Returns the sums over all workers of each counter, gauge, and histogram's sum and count; `name{labels}` names it.

    `admin_address` is the router's, which lists the workers' pages.
    """
    found: Counter[str] = Counter()
    for target in json.loads(_fetch(f"http://{admin_address}/targets")):
        if target["labels"]["role"] == "router":
            continue
        for family in text_string_to_metric_families(_fetch(f"http://{target['targets'][0]}/metrics")):
            for sample in family.samples if family.type in ("counter", "gauge", "histogram") else ():
                if sample.name.startswith("tandem_") and not sample.name.endswith("_bucket"):
                    labels = ",".join(value for _, value in sorted(sample.labels.items()))
                    found[f"{sample.name}{{{labels}}}"] += sample.value  # type: ignore[assignment]
    return found


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        body: bytes = answer.read()
    return body.decode()
