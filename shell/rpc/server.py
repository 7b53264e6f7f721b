"""The shell of every gRPC server: limits, keepalive, health, reflection, channelz, ordered drain.

Life: `start` (NOT_SERVING) → `set_serving(True)` as often as the truth changes → `drain`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import grpc.aio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from opentelemetry.trace import Tracer

from shell.rpc import channelz, health, reflection
from shell.rpc.address import is_taken
from shell.rpc.authentication import REFUSALS, TokenGuard
from shell.rpc.bounds import connection_options
from shell.rpc.interceptors import NO_SUCH_METHOD, CallGuard
from shell.rpc.observing import CallObserving
from shell.telemetry import metric_names
from shell.telemetry.logging import get_logger
from shell.telemetry.metrics import Metrics, Reading
from tandem.errors import ConfigError
from tandem.rpc.channel import MAX_RECEIVE_BYTES, ChannelOptions, keepalive_options
from tandem.rpc.tls import server_credentials
from tandem.security.certificate import not_after_s
from tandem.security.credentials import Incoming

_log = get_logger(__name__)

_ANNOUNCE_S = 0.2
_FLUSH_S = 0.25
"""Between the end of the last handler and the end of connections: its status is still under way."""
_UNLIMITED_S = 1e7
_CLEANUP_S = 2.0
"""Given to handlers' `finally` after their calls were cancelled."""
_PLAIN = Incoming()


async def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Service:
    """A service: `Service("tandem.v1.X", lambda server: add_XServicer_to_server(x, server))`."""

    name: str
    register: Callable[[grpc.aio.Server], None]
    long_lived: bool = False
    """Whether its streams end only with the peer, so that a drain must not wait for them."""
    writers: tuple[str, ...] = ()
    """Methods that write their response themselves and return None."""
    probes: tuple[str, ...] = ()
    """Methods that gateways and scripts call again and again, to look: they begin no traces."""


class RpcServer:
    """A listening gRPC server."""

    def __init__(
        self,
        listen: str,
        services: Sequence[Service],
        *,
        incoming: Incoming = _PLAIN,
        max_receive_bytes: int = MAX_RECEIVE_BYTES,
        announce_s: float = _ANNOUNCE_S,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
        shared_listen: str | None = None,
    ) -> None:
        """`announce_s`: how long NOT_SERVING is told before connections are refused.

        `shared_listen`: a second address, which other processes share.

        `metrics` count its calls; `tracer` gives a span to each that ends by itself.
        """
        self._listen = listen
        self._shared_listen = shared_listen
        self._incoming = incoming
        self._services = tuple(services)
        self._max_receive_bytes = max_receive_bytes
        self._announce_s = announce_s
        self._health = health.HealthServicer(service.name for service in services)
        long_lived = {service.name for service in services if service.long_lived}
        # Health too: anybody may watch it, and take no answer, for as long as they like.
        self._unending = frozenset({*reflection.SERVICE_NAMES, *long_lived, health.SERVICE_NAME})
        writers, self._probes = (
            frozenset(f"/{service.name}/{method}" for service in services for method in getattr(service, kind))
            for kind in ("writers", "probes")
        )
        self._guard = CallGuard(self._unending, writers)
        self._tracer = tracer
        self._server: grpc.aio.Server | None = None
        self._metrics = metrics
        if metrics is not None:
            metrics.add_reader(self._read, metric_names.CERTIFICATE_EXPIRY)

    @property
    def health(self) -> health.HealthServicer:
        """Readiness and life; what the admin port's probes report, too."""
        return self._health

    async def start(self) -> int:
        """Listens; returns the port of `listen`. Raises ConfigError if the address cannot be had."""
        server = grpc.aio.server(interceptors=self._interceptors(), options=self._options())
        for service in self._services:
            service.register(server)
        add_HealthServicer_to_server(self._health, server)
        channelz.add_channelz(server)
        own = (health.SERVICE_NAME, channelz.SERVICE_NAME)
        reflection.add_reflection(server, [*(service.name for service in self._services), *own])
        port = self._bind(server, self._listen)
        if self._shared_listen is not None:
            self._bind(server, self._shared_listen)
        await server.start()
        self._server = server
        return port

    def _bind(self, server: grpc.aio.Server, listen: str) -> int:
        tls = self._incoming.tls
        try:
            if is_taken(listen, shared=self._shared_listen is not None):  # gRPC would write lines of its own
                raise RuntimeError("another process listens there")
            if tls is None:
                return server.add_insecure_port(listen)
            return server.add_secure_port(listen, server_credentials(tls))
        except RuntimeError as error:
            raise ConfigError(
                "--listen", f"cannot listen on {listen}; is the port in use? Name another, or port 0 for any free one"
            ) from error

    def set_serving(self, serving: bool) -> None:
        """Readiness of the process and each service. Without effect once draining."""
        before = self._health.serving
        self._health.set_serving(serving)
        if self._health.serving != before:
            _log.info("serving" if serving else "not serving", listen=self._listen)

    async def drain(
        self,
        grace_s: float,
        refuse: Callable[[], None] = lambda: None,
        others: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        """NOT_SERVING at once; then takes no new calls and waits for running ones, `grace_s` at most. Idempotent.

        `refuse` is called once clients were told to call elsewhere, for what still comes on streams left open.
        `others` is waited for too: work of the process that did not come by gRPC and needs its long-lived streams.
        """
        server, self._server = self._server, None
        self._health.close()
        if server is None:
            return
        await asyncio.sleep(self._announce_s)
        # GOAWAY now, for a client that stayed connected would call here until the last of its streams ends. No
        # grace that runs out: gRPC crashes when one of two stops does so while the other ends.
        leaving = asyncio.create_task(server.stop(grace=_UNLIMITED_S), name="goaway")
        try:
            await asyncio.sleep(0)  # it is under way
            refuse()
            async with asyncio.timeout(grace_s):
                await others()
                await self._guard.idle()
        except TimeoutError:
            _log.warning("calls still running at the end of the drain", grace_s=grace_s)
        finally:
            await asyncio.wait({leaving}, timeout=_FLUSH_S)
            if not leaving.done():
                await server.stop(grace=None)  # cuts what is left
            with contextlib.suppress(TimeoutError):  # a handler that ignores its cancellation
                async with asyncio.timeout(_CLEANUP_S):
                    await self._guard.ended()
            await leaving

    def _interceptors(self) -> tuple[grpc.aio.ServerInterceptor, ...]:
        """From the outermost inwards."""
        interceptors: list[grpc.aio.ServerInterceptor] = [self._guard]
        if self._incoming.tokens is not None:
            interceptors.insert(0, TokenGuard(self._incoming.tokens))
        if self._metrics is not None or self._tracer is not None:
            refusals = (*REFUSALS, NO_SUCH_METHOD)
            untraced, probes = self._unending, self._probes
            observing = CallObserving(self._metrics, self._tracer, untraced=untraced, probes=probes, refusals=refusals)
            interceptors.insert(0, observing)
        return tuple(interceptors)

    def _read(self) -> Iterable[Reading]:
        yield Reading(metric_names.SERVING, self._health.serving)
        tls = self._incoming.tls
        ends_s = None if tls is None else not_after_s(tls.pem().chain)
        if ends_s is not None:
            yield Reading(metric_names.CERTIFICATE_EXPIRY, ends_s)

    def _options(self) -> ChannelOptions:
        return [
            *keepalive_options(),
            *connection_options(),
            ("grpc.so_reuseport", int(self._shared_listen is not None)),
            ("grpc.max_receive_message_length", self._max_receive_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.http2.min_ping_interval_without_data_ms", 500),
            ("grpc.http2.max_ping_strikes", 0),  # our own clients ping often, on purpose
        ]
