"""Metrics of a model server by OpenTelemetry's semantic conventions for generative AI; their names have dots.

Counted beside our own, which know neither operation nor error. Prometheus shows them with underscores, and the unit in
the name. Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/, buckets included.
"""

from __future__ import annotations

from shell.telemetry.metric import Metric, Process

CHAT, TEXT_COMPLETION = OPERATIONS = ("chat", "text_completion")
PROVIDER = "tandem"
_OPERATION = {"gen_ai.operation.name": OPERATIONS}
_ROUTER = (Process.ROUTER,)

REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    "A request's arrival to its last token; to its end, if it has none.",
    _ROUTER,
    {**_OPERATION, "error.type": ()},
    tuple(round(0.01 * 2**power, 2) for power in range(14)),
)
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    "A request's arrival to its first token.",
    _ROUTER,
    _OPERATION,
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    "Mean gap between the tokens of a finished request that has several.",
    _ROUTER,
    _OPERATION,
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)

ALL = (REQUEST_DURATION, TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN)


def attributes_of(model: str) -> dict[str, str]:
    """Returns the attributes that all of these metrics have."""
    return {"gen_ai.provider.name": PROVIDER, "gen_ai.request.model": model, "gen_ai.response.model": model}


def prometheus_name(name: str) -> str:
    """Returns the name of one of these metrics, or of an attribute, as Prometheus shows it."""
    return name.replace(".", "_") + ("_seconds" if name.startswith("gen_ai.server.") else "")
