"""A worker announces itself to every router it can find, and keeps doing so.

One task per `--router` name resolves it at intervals; one task per address found holds a
Register stream: info, then heartbeats: when the load has changed, as often as the router takes them, and at least
three per lease. They carry the engine's step count, since a live event loop proves nothing about its engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable
from dataclasses import replace

import grpc
import grpc.aio

from shell.rpc.status import needs_mending
from shell.telemetry.logging import get_logger
from tandem.convert import info_to_proto, load_to_proto
from tandem.rpc.channel import open_channel
from tandem.rpc.received_error import error_from_rpc
from tandem.security.credentials import Outgoing
from tandem.types import WorkerInfo, WorkerLoad
from tandem.v1 import registry_pb2, registry_pb2_grpc

_log = get_logger(__name__)

RegisterCall = grpc.aio.StreamStreamCall[registry_pb2.RegisterRequest, object]

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_RESOLVE_EVERY_S = 5.0
_PLAIN = Outgoing()
_ANSWER_TIMEOUT_S = 5.0
_BEATS_PER_LEASE = 3
_BEAT_S = 0.25
"""Shortest time between heartbeats that nothing special calls for. A change waits no longer to be sent, so that
placement and status see pools as they are, unless a router with very many workers asks for more time."""


class Announcer:
    """Keeps a Register stream open per router."""

    def __init__(
        self,
        routers: tuple[str, ...],
        info: WorkerInfo,
        load: Callable[[], WorkerLoad],
        on_drain: Callable[[], None],
        *,
        on_registered: Callable[[], None] = lambda: None,
        outgoing: Outgoing = _PLAIN,
        resolve_every_s: float = _RESOLVE_EVERY_S,
    ) -> None:
        """`load` is asked at each heartbeat; `on_drain` is called each time a router asks for it.

        `on_registered` is called each time a router registers the worker.
        """
        self._outgoing = outgoing
        self._routers = routers
        self._info = info
        self._load = load
        self._on_drain = on_drain
        self._on_registered = on_registered
        self._resolve_every_s = resolve_every_s
        self._news = asyncio.Event()
        self._num_calls = 0
        """Calls of `announce_now`."""
        self._listed: dict[str, set[str]] = {}
        """Addresses of each router name by the last lookup that found any."""

    async def run(self) -> None:
        """Registers with all routers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for router in self._routers:
                tasks.create_task(self._follow(router), name=f"announce-{router}")

    def announce_now(self) -> None:
        """Sends a heartbeat to every router at once, such as when draining begins."""
        self._num_calls += 1
        self._news.set()
        self._news = asyncio.Event()

    async def _follow(self, router: str) -> None:
        """Holds a stream per address that `router` resolves to."""
        streams: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                found = await _resolve(router)
                if found:
                    self._listed[router] = found
                streams = {address: task for address, task in streams.items() if not task.done()}
                for address in found - streams.keys():
                    streams[address] = asyncio.create_task(self._hold(address, router), name=f"register-{address}")
                await asyncio.sleep(self._resolve_every_s if found else _FIRST_BACKOFF_S * 5)
        finally:
            for task in streams.values():
                task.cancel()
            await asyncio.gather(*streams.values(), return_exceptions=True)

    async def _hold(self, address: str, router: str) -> None:
        """Keeps registered with the router of that name at `address`.

        Returns once its stream broke and it is no longer listed: the address may come to belong to another process.
        A stream that works is left alone, since a lookup may be wrong.
        """
        called = router.rpartition(":")[0].strip("[]")
        backoff_s = _FIRST_BACKOFF_S
        was_there = False
        while address in self._listed[router]:
            registered = asyncio.Event()
            try:
                async with open_channel(address, self._outgoing, called=called) as channel:
                    await self._register(channel, address, registered)
            except grpc.aio.AioRpcError as error:
                failure = error_from_rpc(error)
                log = _log.warning if needs_mending(failure) else _log.info
                was_there = was_there or registered.is_set()
                advised = needs_mending(failure) or not was_there  # a router that was there has stopped, or will return
                told = failure.message if advised else f"{error.code().name}: {error.details()}"
                log("registration ended", router=address, error=told)
            except (TimeoutError, asyncio.InvalidStateError) as error:  # the latter: written to an ended call
                _log.info("registration interrupted", router=address, kind=type(error).__name__)
            except asyncio.CancelledError:
                # grpc.aio raises this, too, where the *router* ends the stream with CANCELLED.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
            backoff_s = _FIRST_BACKOFF_S if registered.is_set() else min(_MAX_BACKOFF_S, backoff_s * 2)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    async def _register(self, channel: grpc.aio.Channel, address: str, registered: asyncio.Event) -> None:
        """Holds a stream, from info to its end. Raises AioRpcError, TimeoutError."""
        call: RegisterCall = registry_pb2_grpc.RegistryServiceStub(channel).Register(metadata=self._outgoing.metadata())
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            await call.write(registry_pb2.RegisterRequest(info=info_to_proto(self._info)))
            await call.write(registry_pb2.RegisterRequest(load=load_to_proto(self._load())))
            first = await call.read()
        if not isinstance(first, registry_pb2.RegisterResponse):
            return
        registered.set()
        self._on_registered()
        _log.info("registered", router=address, lease_s=first.lease_seconds)
        tasks = {
            asyncio.create_task(self._obey(call, first, address), name=f"router-{address}"),
            asyncio.create_task(self._beat(call, first), name=f"heartbeat-{address}"),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    async def _obey(self, call: RegisterCall, response: object, router: str) -> None:
        """Does what the router asks for, until the router ends the stream."""
        set_apart = ""
        while isinstance(response, registry_pb2.RegisterResponse):
            if response.drain:
                self._on_drain()
            if response.set_apart and not set_apart:
                _log.warning("set apart: this worker gets no new requests", router=router, why=response.set_apart)
            elif set_apart and not response.set_apart:
                _log.info("no longer set apart", router=router)
            set_apart = response.set_apart
            response = await call.read()

    async def _beat(self, call: RegisterCall, granted: registry_pb2.RegisterResponse) -> None:
        """Sends heartbeats. Raises TimeoutError if the router does not take one within the lease."""
        rhythm = Rhythm(granted.lease_seconds, granted.heartbeat_seconds)
        num_calls = self._num_calls
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rhythm.pause_s):
                    await self._news.wait()
            load, is_called = self._load(), num_calls != self._num_calls
            if rhythm.is_due(load) or is_called:
                num_calls = self._num_calls
                rhythm.sent(load)
                async with asyncio.timeout(granted.lease_seconds):
                    await call.write(registry_pb2.RegisterRequest(load=load_to_proto(load)))


class Rhythm:
    """Decides when a heartbeat of one stream is due; asked after each pause."""

    def __init__(self, lease_s: float, pause_s: float) -> None:
        """`pause_s`: the shortest between two that the router asks for; 0 = it does not say."""
        at_most_s = lease_s / _BEATS_PER_LEASE
        self.pause_s = min(max(_BEAT_S, pause_s), at_most_s)
        """Time between two looks at the load."""
        self._most_pauses = int(at_most_s / self.pause_s)
        self._num_pauses = 0
        self._sent: WorkerLoad | None = None

    def is_due(self, load: WorkerLoad) -> bool:
        """Whether there is news, or the lease needs a heartbeat. Called once a pause."""
        self._num_pauses += 1
        return self._num_pauses >= self._most_pauses or self._sent is None or _lasting(load) != _lasting(self._sent)

    def sent(self, load: WorkerLoad) -> None:
        """A heartbeat went out."""
        self._num_pauses, self._sent = 0, load


def _lasting(load: WorkerLoad) -> WorkerLoad:
    """Returns `load` without what every step changes, which is no news in itself."""
    pool = replace(load.pool, unused_slots=0)
    return replace(
        load,
        engine_steps=0,
        prompt_tokens_per_s=0.0,
        step_s=0.0,
        step_objective_s=0.0,
        pool=pool,
        steps_per_s=0.0,
        chunk_tokens=0,
        device_used_bytes=0,
    )


async def _resolve(router: str) -> set[str]:
    """Returns the addresses of `HOST:PORT`; IPv4 only where there are any, so that a dual-stack name counts once."""
    host, _, port = router.rpartition(":")
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            infos = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:  # TimeoutError is one
        _log.warning("router name does not resolve", router=router, error=str(error))
        return set()
    ipv4 = {f"{info[4][0]}:{port}" for info in infos if info[0] == socket.AF_INET}
    return ipv4 or {f"[{info[4][0]}]:{port}" for info in infos if info[0] == socket.AF_INET6}
