"""How gRPC itself treats calls of our clients: spread over all routers that a target names, and retried.

A call is retried only while nothing of its answer has come, so a stream is never repeated; what a
router cannot finish it moves to other workers by itself. Source: gRPC proposal A6 (client retries).
"""

from __future__ import annotations

import json

_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{}],  # every method
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}

RETRY_BUFFER_BYTES = 8 * 1024 * 1024
"""A request larger than this is sent once."""


def service_config_options() -> list[tuple[str, str | int]]:
    """Channel options for a client of routers."""
    return [("grpc.service_config", json.dumps(_CONFIG)), ("grpc.per_rpc_retry_buffer_size", RETRY_BUFFER_BYTES)]
