"""What both clients have in common: how routers are dialled, and what goes with each call.

gRPC itself spreads calls over all routers that a target names, and retries them. A call is retried only while nothing
of its answer has come, so a stream is never repeated; what a router cannot finish it moves to other workers by itself.
CANCELLED, where it is not the caller's own doing, is what a call gets that crosses the GOAWAY of a router that drains.
Of several routers only those are called that say SERVING; a single one is called in any case, since it says best what
is missing. Sources: gRPC proposals A6 (client retries) and A17 (client-side health checking).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tandem.client_config import DEFAULT_ADDRESS
from tandem.errors import Reason, Unavailable
from tandem.rpc.channel import CONNECT_TIMEOUT_S
from tandem.rpc.google_messages import health_watch
from tandem.security.credentials import Outgoing
from tandem.security.options import ClientSecurityConfig
from tandem.v1 import cluster_pb2_grpc, inference_pb2_grpc

try:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError:
    _propagator = None
else:
    _propagator = TraceContextTextMapPropagator()

CALL_TIMEOUT_S = 10.0
"""Deadline of calls that do not generate, unless the caller names another."""
RETRY_S = 0.1
"""Between two looks at a server that is not ready."""
CLOSED = "this client was closed"
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


class Caller:
    """A channel to routers, with its stubs."""

    _dial: Callable[..., Any]

    def __init__(
        self,
        target: str = DEFAULT_ADDRESS,
        *,
        security: ClientSecurityConfig | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """`target` is `HOST:PORT`, `dns:///NAME:PORT` or `ipv4:HOST:PORT,HOST:PORT`; calls are spread over all
        of its addresses, and go to another one where a router is not there or drains.

        A server that cannot be reached is Unavailable after `connect_timeout_s`.

        `security` names files: certificates are read now, tokens again when their file changes. Raises
        ConfigError if one is no good, or if a token would cross a network in clear.
        """
        self._target = target
        self._closed = False
        self._outgoing = Outgoing.of_client(security or ClientSecurityConfig(), target)
        self._channel = self._dial(
            target,
            self._outgoing,
            max_receive_bytes=-1,  # an answer is what was asked for, however long
            connect_timeout_s=connect_timeout_s,
            more_options=_channel_options(target),
        )
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._cluster = cluster_pb2_grpc.ClusterServiceStub(self._channel)
        self._health = health_watch(self._channel)

    def _passing(self, error: Unavailable) -> str:
        """Returns why a server is not ready yet. Raises `error` where waiting does not mend it."""
        if self._closed or error.reason is Reason.TLS_FAILED:
            raise error
        return error.message

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of a call: the present token, and the caller's trace if a span is open."""
        carrier: dict[str, str] = {}
        if _propagator is not None:
            _propagator.inject(carrier)
        return (*self._outgoing.metadata(), *carrier.items())


def _channel_options(target: str) -> list[tuple[str, str | int]]:
    scheme, _, rest = target.partition(":")
    names_several = scheme in {"dns", "ipv4", "ipv6"} and bool(rest)
    config = _CONFIG | _HEALTH if names_several else _CONFIG
    return [("grpc.service_config", json.dumps(config)), ("grpc.per_rpc_retry_buffer_size", RETRY_BUFFER_BYTES)]
