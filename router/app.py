"""The router process, put together: config in, exit code out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from random import Random

from opentelemetry.trace import Tracer

from router.admission import Admission, AdmissionQueue
from router.cluster_view import ClusterView
from router.entrance import Entrance
from router.faces.foreign_services import foreign_services
from router.faces.tandem.cluster import SERVICE_NAME as CLUSTER_SERVICE
from router.faces.tandem.cluster import ClusterServicer
from router.faces.tandem.inference import SERVICE_NAME as INFERENCE_SERVICE
from router.faces.tandem.inference import InferenceServicer
from router.generation import RetryPolicy
from router.health import Health
from router.metrics import RouterMetrics
from router.readings import RouterReadings
from router.registry import Registry
from router.registry_servicer import SERVICE_NAME as REGISTRY_SERVICE
from router.registry_servicer import RegistryServicer
from router.request_spans import request_spans
from router.tokenization import Tokenization
from router.workers import Workers
from tandem.admin.content import AdminContent, RouterReport
from tandem.admin.port import admin_port
from tandem.checkpoint import read_checkpoint
from tandem.clock import Clock, MonotonicClock
from tandem.config import RouterConfig
from tandem.rpc.process import StopSignal, run_process
from tandem.rpc.server import RpcServer, Service
from tandem.security.credentials import Incoming, Security
from tandem.telemetry.logging import configure_logging
from tandem.telemetry.loop_lag import LoopLag
from tandem.telemetry.metric import Process
from tandem.telemetry.metrics import Metrics
from tandem.telemetry.observers import RouterObserver
from tandem.telemetry.observers_together import router_observers
from tandem.telemetry.recent_latencies import RecentLatencies
from tandem.telemetry.tracing import tracing
from tandem.types import new_incarnation
from tandem.v1.cluster_pb2_grpc import add_ClusterServiceServicer_to_server
from tandem.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from tandem.v1.registry_pb2_grpc import add_RegistryServiceServicer_to_server

_STALL_S = 30.0
"""An engine with sequences that makes no step for this long is not used (a step of a large
prompt on a starved CPU may take several seconds)."""


@dataclass(frozen=True, slots=True)
class Router:
    """One router's parts, wired; what `serve` runs and tests look into."""

    config: RouterConfig
    tokenization: Tokenization
    registry: Registry
    workers: Workers
    queue: AdmissionQueue
    entrance: Entrance
    health: Health
    server: RpcServer
    recent: RecentLatencies
    """What the router's observers feed and its status tells."""
    view: ClusterView
    metrics: Metrics
    admin: AdminContent
    incoming: Incoming
    """What callers of every port meet."""

    @classmethod
    def build(
        cls,
        config: RouterConfig,
        *,
        clock: Clock | None = None,
        policy: RetryPolicy | None = None,
        stall_s: float = _STALL_S,
        rng: Random | None = None,
        observer: RouterObserver | None = None,
        tracer: Tracer | None = None,
    ) -> Router:
        """Reads the checkpoint and wires the rooms. Raises CheckpointError, ConfigError. Call inside an event loop.

        `observer` hears of every request, and so do the router's metrics; `tracer` makes its spans.
        """
        clock, security = clock or MonotonicClock(), Security.load(config.security, config.ports)
        checkpoint = read_checkpoint(config.model)
        metrics, recent = Metrics(Process.ROUTER, checkpoint.name), RecentLatencies(clock)
        spans, counting = request_spans(tracer, checkpoint.name), RouterMetrics(metrics, recent, clock)
        observer = router_observers([*spans, counting, *filter(None, [observer])])
        tokenization = Tokenization.load(checkpoint.path)
        registry = Registry(checkpoint.name, checkpoint.config_fingerprint, clock, config.lease_s, stall_s)
        workers = Workers(registry, new_incarnation(), rng or Random(), security.outgoing)
        queue = AdmissionQueue(config.max_active_requests, config.max_queued_requests, config.max_queued_tokens)
        policy = policy or RetryPolicy(max_retries=config.max_retries)
        entrance = Entrance(
            checkpoint, tokenization, config.limits, workers, Admission(queue, clock), clock, policy, observer
        )
        health = Health(workers, registry, entrance)
        inference = InferenceServicer(checkpoint, tokenization, entrance, config.limits)
        registrations = RegistryServicer(registry, security.outgoing)
        view = ClusterView(checkpoint.name, registry, queue, health, recent, clock)
        services = (
            *_own_services(inference, ClusterServicer(view, registry, registrations), registrations),
            *foreign_services(checkpoint, config, entrance, health, view, clock),
        )
        server = RpcServer(
            config.listen,
            services,
            incoming=security.incoming,
            max_receive_bytes=config.max_receive_bytes,
            metrics=metrics,
            tracer=tracer,
        )
        metrics.add_reader(RouterReadings(config, queue, registry, entrance))
        return cls(
            config=config,
            tokenization=tokenization,
            registry=registry,
            workers=workers,
            queue=queue,
            entrance=entrance,
            health=health,
            server=server,
            recent=recent,
            view=view,
            metrics=metrics,
            admin=_admin_content(server, view, metrics),
            incoming=security.incoming,
        )

    async def serve(self, until: Callable[[], Awaitable[None]], on_listening: Callable[[int], None]) -> None:
        """Serves until `until` returns; then finishes what runs, within the drain's grace."""
        async with AsyncExitStack() as stack:
            stack.callback(self.tokenization.close)
            stack.enter_context(LoopLag(self.metrics))
            await stack.enter_async_context(self.workers)
            admin = admin_port(self.config.admin_listen, self.admin, self.incoming)
            self.view.set_admin_address(await stack.enter_async_context(admin))
            on_listening(await self.server.start())
            health = asyncio.create_task(self.health.run(self.server), name="health")
            stack.callback(health.cancel)
            await _first_of(health, until)
            await self.server.drain(self.config.drain_grace_s, self.entrance.begin_drain)


def _own_services(
    inference: InferenceServicer, cluster: ClusterServicer, registrations: RegistryServicer
) -> tuple[Service, ...]:
    """Those of `tandem.v1`."""
    return (
        Service(INFERENCE_SERVICE, lambda server: add_InferenceServiceServicer_to_server(inference, server)),
        Service(CLUSTER_SERVICE, lambda server: add_ClusterServiceServicer_to_server(cluster, server)),
        Service(
            REGISTRY_SERVICE,
            lambda server: add_RegistryServiceServicer_to_server(registrations, server),
            long_lived=True,
        ),
    )


def _admin_content(server: RpcServer, view: ClusterView, metrics: Metrics) -> AdminContent:
    return AdminContent(
        health=server.health,
        report=lambda: RouterReport(cluster=view.status()),
        metrics=metrics.exposition,
        targets=view.scrape_targets,
    )


async def _first_of(health: asyncio.Task[None], until: Callable[[], Awaitable[None]]) -> None:
    """Returns when `until` does; raises what `health` dies of, for without it leases never end."""
    stop = asyncio.ensure_future(until())
    try:
        await asyncio.wait({health, stop}, return_when=asyncio.FIRST_COMPLETED)
        if health.done():
            health.result()
    finally:
        stop.cancel()


def run(config: RouterConfig) -> int:
    """Runs the process until SIGTERM; returns its exit code."""
    configure_logging("router", config.log_format, config.log_level)

    async def main(tracer: Tracer | None, stop: StopSignal) -> None:
        router = Router.build(config, tracer=tracer)
        host = config.listen.rpartition(":")[0]
        await router.serve(stop.wait, lambda port: print(f"ready {host}:{port}", flush=True))

    with tracing("tandem-router") as tracer:
        return run_process(partial(main, tracer))
