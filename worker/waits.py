"""Which requests wait on a worker, and for what, reported to routers at intervals: to wait is not to be forgotten."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from shell.telemetry.logging import get_logger
from tandem.types import Handle, WaitReason
from worker.ports import RouterPort
from worker.request import Request

_log = get_logger(__name__)

REPORT_S = 5.0
"""Between two reports: a small part of the silence after which a router tries elsewhere (`RetryPolicy.silence_s`)."""

Wait: TypeAlias = tuple[Request, WaitReason]
"""A request that is held here and gets no tokens now, and what it waits for."""


def report_waits(waits: Iterable[Wait]) -> None:
    """Reports to each router its own requests that wait, in a message per reason."""
    handles: defaultdict[tuple[RouterPort, WaitReason], list[Handle]] = defaultdict(list)
    for request, reason in waits:
        handles[request.router, reason].append(request.handle)
    for (router, reason), waiting in handles.items():
        router.waiting(reason, waiting)
        _log.debug("requests wait", reason=reason, num_requests=len(waiting))
