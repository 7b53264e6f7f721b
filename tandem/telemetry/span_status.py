"""How a span says that it ended badly: status ERROR and `error.type`, never a message, which might quote a caller."""

from __future__ import annotations

from opentelemetry.trace import Span, Status, StatusCode

ERROR_TYPE = "error.type"
CANCELLED = "cancelled"


def mark_failed(span: Span, reason: str) -> None:
    """`reason`: a word of a known set, such as a `tandem.errors.Reason`."""
    span.set_attribute(ERROR_TYPE, reason)
    span.set_status(Status(StatusCode.ERROR, reason))
