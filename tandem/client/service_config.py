"""How gRPC itself treats calls of our clients: spread over all routers that a target names, and retried.

A call is retried only while nothing of its answer has come, so a stream is never repeated; what a
router cannot finish it moves to other workers by itself. CANCELLED, where it is not the caller's own
doing, is what a call gets that crosses the GOAWAY of a router that drains. Of several routers only
those are called that say SERVING; a single one is called in any case, since it says best what is
missing. Sources: gRPC proposals A6 (client retries) and A17 (client-side health checking).
"""

from __future__ import annotations

import json
from typing import Any

_CONFIG: dict[str, Any] = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{}],  # every method
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
            },
        }
    ],
}

RETRY_BUFFER_BYTES = 8 * 1024 * 1024
"""A request larger than this is sent once."""


_HEALTH = {"healthCheckConfig": {"serviceName": "tandem.v1.InferenceService"}}


def service_config_options(target: str) -> list[tuple[str, str | int]]:
    """Channel options for a client of the routers at `target`."""
    scheme, _, rest = target.partition(":")
    names_several = scheme in {"dns", "ipv4", "ipv6"} and bool(rest)
    config = _CONFIG | _HEALTH if names_several else _CONFIG
    return [("grpc.service_config", json.dumps(config)), ("grpc.per_rpc_retry_buffer_size", RETRY_BUFFER_BYTES)]
