"""What both clients have in common: how a router is dialled, and what goes with each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem.client.service_config import service_config_options
from tandem.config import DEFAULT_ADDRESS, ClientSecurityConfig
from tandem.rpc.channel import CONNECT_TIMEOUT_S
from tandem.rpc.google_messages import health_watch
from tandem.security.credentials import Outgoing
from tandem.v1 import cluster_pb2_grpc, inference_pb2_grpc

try:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError:
    _propagator = None
else:
    _propagator = TraceContextTextMapPropagator()

CALL_TIMEOUT_S = 10.0
"""For calls that do not generate, where the caller names no time."""
RETRY_S = 0.1
"""Between two looks at a server that is not ready."""
CLOSED = "this client was closed"


class Caller:
    """One channel to routers, and its stubs."""

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
        options = service_config_options(target)
        self._channel = self._dial(target, self._outgoing, connect_timeout_s=connect_timeout_s, more_options=options)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._cluster = cluster_pb2_grpc.ClusterServiceStub(self._channel)
        self._health = health_watch(self._channel)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Of one call: the token as it is now, and the caller's trace, if it has OpenTelemetry and is in a span."""
        carrier: dict[str, str] = {}
        if _propagator is not None:
            _propagator.inject(carrier)
        return (*self._outgoing.metadata(), *carrier.items())
