"""Names of metrics wherever deploy/ uses them: dashboards, rules, autoscalers."""

from __future__ import annotations

import re
from pathlib import Path

DEPLOY = Path(__file__).parents[1] / "deploy"
_NAME = re.compile(r"(?<![\w:/-])(?:tandem_[a-z0-9_]+|vllm:[a-z0-9_]+)(?![\w:])")
_OF_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


def referenced_metrics() -> dict[str, set[str]]:
    """Each name of ours or vLLM's, with the files that use it; sums and buckets by their histogram's name."""
    found: dict[str, set[str]] = {}
    for path in sorted(DEPLOY.rglob("*")):
        if path.suffix in {".yml", ".yaml", ".json"}:
            for name in _NAME.findall(path.read_text()):
                found.setdefault(_OF_HISTOGRAM.sub("", name), set()).add(str(path.relative_to(DEPLOY)))
    return found
