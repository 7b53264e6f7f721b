"""The router process, put together: config in, exit code out."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random

from opentelemetry.trace import Tracer

from models.files.checkpoint import CheckpointInfo
from models.files.hub import fetched
from models.preflight import read_servable
from router.admission import Admission, AdmissionQueue
from router.delivery import Unread
from router.entrance import Entrance
from router.faces.kserve.servicer import KserveServicer, kserve_service
from router.faces.tandem.cluster import CLUSTER_SERVICE, REGISTRY_SERVICE, ClusterServicer, RegistryServicer
from router.faces.tandem.inference import INFERENCE_SERVICE, WRITERS, InferenceServicer
from router.faces.vllm.servicer import VllmServicer, vllm_service
from router.generation import Rooms
from router.grammar_check import GrammarCheck
from router.metrics import RouterMetrics
from router.request_spans import RequestSpans
from router.retries import RetryPolicy
from router.status import RouterStatus
from router.tokenization import Tokenization
from router.tuning import FEWEST_ACTIVE
from router.worker_link import WorkerLink
from router.workers import Workers
from shell.admin.content import AdminContent, RouterReport
from shell.admin.history import History
from shell.admin.port import admin_port
from shell.clock import Clock, MonotonicClock
from shell.config import DEFAULT_ADMIN_ADDRESS, RouterConfig
from shell.http.server import HttpServer
from shell.rpc.process import StopSignal, run_process
from shell.rpc.server import RpcServer, Service
from shell.telemetry.events import ProcessEvents, RouterEvents, RouterListener
from shell.telemetry.logging import configure_logging
from shell.telemetry.loop_lag import LoopLag
from shell.telemetry.metric import Process
from shell.telemetry.metrics import Metrics
from shell.telemetry.otlp import exporting_metrics, tracing
from shell.telemetry.recent_latencies import RecentLatencies
from tandem.security.credentials import Outgoing, Security
from tandem.types import new_incarnation
from tandem.v1.cluster_pb2_grpc import add_ClusterServiceServicer_to_server
from tandem.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from tandem.v1.registry_pb2_grpc import add_RegistryServiceServicer_to_server

_STALL_S = 30.0
"""An engine with sequences that makes no step for this long is not used (a step of a large
prompt on a starved CPU may take several seconds)."""


_SERVICE_NAME = "tandem-router"
_GC_THRESHOLD = 50_000
"""New objects before the youngest are searched for cycles. A step brings thousands that no cycle holds: at Python's own
threshold, 700, a sixth of the router's time went into looking through them."""


class Router:
    """A router's parts, wired: `serve` runs them, tests look into them."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        clock: Clock | None = None,
        policy: RetryPolicy | None = None,
        stall_s: float = _STALL_S,
        rng: Random | None = None,
        listener: RouterListener | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Reads the checkpoint and wires the rooms. Raises CheckpointError, ConfigError. Call inside an event loop.

        `listener` hears of every request, and so do the router's metrics; `tracer` makes its spans.
        """
        self.config, self.clock = config, clock or MonotonicClock()
        self._security = Security.load(config.security, config.ports)
        read = read_servable(config.model).checkpoint.within(config.context_tokens)
        checkpoint = read.called(config.served_model_names)
        self.metrics, self.recent = Metrics(Process.ROUTER, checkpoint.name), RecentLatencies(self.clock)
        counting = RouterMetrics(self.metrics, self.recent, self.clock)
        spans, others = RequestSpans(tracer, checkpoint.name), () if listener is None else (listener,)
        events: RouterEvents = ProcessEvents(spans.hear, counting.hear, *others)
        self.tokenization = _load_tokenization(config, checkpoint)
        self.workers = Workers(
            read.name,
            checkpoint.config_fingerprint,
            self.clock,
            config.lease_s,
            stall_s,
            partial(WorkerLink, router=new_incarnation(), credentials=self._security.outgoing),
            rng or Random(),
            falls_back=config.fallback == "local",
            pinned=config.model_fingerprint or "",
        )
        self.queue = AdmissionQueue(
            config.max_active_requests or FEWEST_ACTIVE, config.max_queued_requests, config.max_queued_tokens
        )
        policy = policy or RetryPolicy(patience_s=config.patience_s)
        admission = Admission(self.queue, self.clock)
        rooms = Rooms(self.workers, admission, self.clock, policy, counting, spans, events, config.stream_interval_s)
        unread = Unread(self.clock, config.max_unread_bytes, config.max_unread_s)
        self.grammars = GrammarCheck(checkpoint.path)
        self.entrance = Entrance(
            checkpoint, self.tokenization, config.limits, rooms, unread, config.max_priority, self.grammars
        )
        self.status = RouterStatus(
            config, checkpoint.name, self.workers, admission, self.entrance, counting, self.clock
        )
        self.metrics.add_reader(self.status.readings)
        self._server = RpcServer(
            config.listen,
            self._services(checkpoint, self._security.outgoing),
            incoming=self._security.incoming,
            max_receive_bytes=config.limits.max_message_bytes,
            metrics=self.metrics,
            tracer=tracer,
            shared_listen=config.shared_listen,
        )
        self._http = None if config.http is None else self._http_server(config.http, checkpoint, tracer)

    async def serve(self, until: Callable[[], Awaitable[None]], on_listening: Callable[[int], None]) -> None:
        """Serves until `until` returns; then finishes what runs, within the drain's grace."""
        history = History(self.status.history)
        content = AdminContent(
            health=self._server.health,
            report=lambda: RouterReport(cluster=self.status.cluster()),
            history=history.report,
            metrics=self.metrics.exposition,
            targets=self.status.scrape_targets,
        )
        async with AsyncExitStack() as stack:
            stack.callback(self.tokenization.close)
            stack.callback(self.grammars.close)
            stack.enter_context(LoopLag(self.metrics))
            await stack.enter_async_context(self.workers)
            stack.enter_context(history)
            falls_back = self.config.admin_listen == DEFAULT_ADMIN_ADDRESS
            admin = admin_port(self.config.admin_listen, content, self._security.incoming, falls_back=falls_back)
            self.status.admin_address = await stack.enter_async_context(admin)
            port = await self._server.start()
            if self._http is not None:
                stack.push_async_callback(self._http.close)
                await self._http.start()
            on_listening(port)
            health = asyncio.create_task(self.status.announce(self._server), name="health")
            stack.callback(health.cancel)
            await _first_of(health, until)
            await self._server.drain(self.config.drain_grace_s, self.entrance.begin_drain, self._http_drained)

    async def _http_drained(self) -> None:
        if self._http is not None:
            await self._http.drain()

    def _http_server(self, listen: str, checkpoint: CheckpointInfo, tracer: Tracer | None) -> HttpServer:
        # Only where it is wanted: the gRPC services need neither its modules nor msgspec.
        from router.faces.openai.desk import Desk
        from router.faces.openai.errors import error_response
        from router.faces.openai.face import http_routes
        from router.faces.parsers.formats import detect_format

        answers = detect_format(self.tokenization.chat_template_source, self.tokenization.special_tokens)
        desk = Desk(checkpoint, self.tokenization, self.entrance, self.status, answers, datetime.now(UTC))
        return HttpServer(
            listen,
            http_routes(desk, self.metrics),
            error_response,
            incoming=self._security.incoming,
            max_body_bytes=self.config.limits.max_message_bytes,
            metrics=self.metrics,
            tracer=tracer,
            allowed_origins=self.config.http_origins,
            shares_port=self.config.shared_listen is not None,
        )

    def _services(self, checkpoint: CheckpointInfo, outgoing: Outgoing) -> tuple[Service, ...]:
        config, entrance, status = self.config, self.entrance, self.status
        inference = InferenceServicer(checkpoint, self.tokenization, entrance, config.limits)
        registry = RegistryServicer(self.workers, outgoing)
        cluster = ClusterServicer(status, registry)
        return (
            Service(
                INFERENCE_SERVICE,
                partial(add_InferenceServiceServicer_to_server, inference),
                writers=WRITERS,
                probes=("GetModel",),
            ),
            Service(CLUSTER_SERVICE, partial(add_ClusterServiceServicer_to_server, cluster), probes=("GetStatus",)),
            Service(REGISTRY_SERVICE, partial(add_RegistryServiceServicer_to_server, registry), long_lived=True),
            kserve_service(KserveServicer(checkpoint, entrance, status, self.clock, config.limits)),
            vllm_service(VllmServicer(checkpoint, config, entrance, status)),
        )


def _load_tokenization(config: RouterConfig, checkpoint: CheckpointInfo) -> Tokenization:
    """Reads the files that `config_fingerprint` is of. Raises CheckpointError if one has changed since, ConfigError."""
    template = None if config.chat_template is None else Path(config.chat_template)
    tokenization = Tokenization.load(checkpoint.texts, template, checkpoint.eos_token_ids)
    checkpoint.read.check()
    return tokenization


async def _first_of(health: asyncio.Task[None], until: Callable[[], Awaitable[None]]) -> None:
    """Returns when `until` does; raises what ends `health`, for without it leases never end."""
    stop = asyncio.ensure_future(until())
    try:
        await asyncio.wait({health, stop}, return_when=asyncio.FIRST_COMPLETED)
        if health.done():
            health.result()
    finally:
        stop.cancel()


def run(config: RouterConfig) -> int:
    """Runs the process until SIGTERM; returns its exit code. Raises ConfigError, CheckpointError."""
    configure_logging("router", config.log_format, config.log_level)
    config = replace(config, model=fetched(config.model, weights=False))

    async def main(tracer: Tracer | None, stop: StopSignal) -> None:
        router = Router(config, tracer=tracer)
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        host = config.listen.rpartition(":")[0]
        with exporting_metrics(router.metrics, _SERVICE_NAME):
            await router.serve(stop.wait, lambda port: print(f"ready {host}:{port}", flush=True))

    with tracing(_SERVICE_NAME) as tracer:
        return run_process(partial(main, tracer))
