"""Whether a cluster is at rest after a test."""

from __future__ import annotations

from bench.support.cluster import eventually
from tandem.client import Client


def nothing_runs(client: Client, timeout_s: float = 5.0) -> bool:
    """Whether, within the time, no request waits or runs. The router knows at once; workers tell of blocks later."""

    def none() -> bool:
        status = client.status()
        return status.active_requests == status.queued_requests == 0

    return eventually(none, timeout_s)
