"""One stream to one worker, with all of this router's requests in it.

    connecting ──both hellos──▶ connected ──stream ends──▶ connecting …     until `close`

Each request is named by a handle and has a listener, told of its messages without awaiting.
When the stream ends, every listener is told at once; the worker releases them all by itself.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import grpc.aio

from router.prefix_map import PrefixMap
from shell.rpc.status import needs_mending
from shell.telemetry.logging import get_logger
from tandem.convert import deltas_from_proto, error_from_failed, logprobs_from_proto
from tandem.errors import InternalError, InvalidOutput, Reason, TandemError, Unavailable
from tandem.rpc.channel import open_channel
from tandem.rpc.received_error import error_from_rpc
from tandem.security.credentials import Outgoing
from tandem.types import UNKNOWN_ROUTE, Handle, Incarnation, KvRoute, TokenDelta, TokenLogprobs, WorkerInfo
from tandem.v1 import worker_pb2, worker_pb2_grpc

_HELLO_TIMEOUT_S = 5.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0

_Call: TypeAlias = "grpc.aio.StreamStreamCall[worker_pb2.ConnectRequest, worker_pb2.ConnectResponse]"

_log = get_logger(__name__)


class GroupListener(Protocol):
    """Told what becomes of one request on the workers that run it. Must not await; after a worker's `failed`, nothing
    more comes from that worker. `sender` is the very WorkerInfo of the link that tells.
    """

    def reserved(self, sender: WorkerInfo, ticket: bytes, kv_endpoint: bytes) -> None:
        """Room was made; both are empty where the worker computes the prompt itself."""

    def prefill_started(self, sender: WorkerInfo) -> None:
        """The prompt's turn has come: its first chunk is being computed."""

    def prompt_logprobs(self, sender: WorkerInfo, offset: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Log-probabilities of the prompt's tokens from `offset` on."""

    def prefill_done(self, sender: WorkerInfo, queue_s: float, prefill_s: float, cached_tokens: int) -> None:
        """The prompt is computed, but for the first `cached_tokens`, whose KV the worker had; first tokens follow."""

    def handoff_done(self, sender: WorkerInfo, num_bytes: int, seconds: float, route: KvRoute = UNKNOWN_ROUTE) -> None:
        """The decode worker that it was sent to has verified and attached the KV. Nothing follows from `sender`."""

    def leaving(self, sender: WorkerInfo) -> None:
        """The decode worker drains, and would hand it over to another one. It goes on meanwhile."""

    def tokens(self, sender: WorkerInfo, delta: TokenDelta) -> None:
        """New tokens of a choice."""

    def waiting(self, sender: WorkerInfo) -> None:
        """The worker still holds the request, which waits."""

    def failed(self, sender: WorkerInfo, error: TandemError) -> None:
        """It ended without all its tokens, or the worker was lost (reason WORKER_LOST)."""


class WorkerLink:
    """Connects as soon as it is made, and again after each loss, until `close`."""

    def __init__(
        self, info: WorkerInfo, on_change: Callable[[], None], *, router: Incarnation, credentials: Outgoing
    ) -> None:
        """`on_change` is called when `connected` may have changed."""
        self.connected = False
        """Whether the stream stands."""
        self.held = PrefixMap()
        """What the worker's cache holds."""
        self._info = info
        self._router = router
        self._on_change = on_change
        self._credentials = credentials
        self._backoff_s = _FIRST_BACKOFF_S
        self._handles = itertools.count(1)
        self._listeners: dict[Handle, GroupListener] = {}
        self._outgoing: deque[worker_pb2.ConnectRequest] = deque()
        self._has_outgoing = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"link to {info.worker_id}")

    def close(self) -> None:
        """Ends the stream; its listeners are told."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Returns once the stream is closed."""
        await asyncio.gather(self._task, return_exceptions=True)

    def watch(self, listener: GroupListener) -> Handle:
        """For a request that `reserve` may follow for: until then, `listener` is told of the worker's loss alone."""
        handle = self._new_handle(listener)
        if not self.connected:
            self._fail(handle, self._lost())
        return handle

    def reserve(
        self, handle: Handle, group: worker_pb2.Group, *, local_prefill: bool, max_local_tokens: int | None = None
    ) -> None:
        """Asks a decode worker to make room. The answer comes to the listener; a no-op once the worker was lost.

        `max_local_tokens`: with local prefill, most tokens of it that the worker's cache may lack; None = any number.
        """
        if handle in self._listeners:
            reserve = worker_pb2.Reserve(
                handle=handle, group=group, local_prefill=local_prefill, max_local_tokens=max_local_tokens
            )
            self._enqueue(worker_pb2.ConnectRequest(reserve=reserve))

    def prefill(self, group: worker_pb2.Group, listener: GroupListener, destination: str) -> Handle:
        """Asks a prefill worker to compute a prompt for the decode worker `destination`.

        The answer comes to `listener`; after it, `grant` is due.
        """
        handle = self._new_handle(listener)
        prefill = worker_pb2.Prefill(handle=handle, group=group, destination=destination)
        return self._ask(handle, worker_pb2.ConnectRequest(prefill=prefill))

    def grant(self, handle: Handle, ticket: bytes, kv_endpoint: bytes) -> None:
        """Tells a prefill worker where the KV goes. A no-op if the request has ended there."""
        if handle in self._listeners:
            grant = worker_pb2.Grant(handle=handle, ticket=ticket, kv_endpoint=kv_endpoint)
            self._enqueue(worker_pb2.ConnectRequest(grant=grant))

    def move(
        self, handle: Handle, choices: Sequence[worker_pb2.GroupChoice], ticket: bytes, kv_endpoint: bytes
    ) -> None:
        """Tells a decode worker where the KV of a running request goes. A no-op if the request has ended there.

        `choices` are those that go, as the other worker knows them.
        """
        if handle in self._listeners:
            hand_over = worker_pb2.HandOver(
                handle=handle,
                choices=[each.index for each in choices],
                output_tokens=min(len(each.output_token_ids) for each in choices),
                ticket=ticket,
                kv_endpoint=kv_endpoint,
            )
            self._enqueue(worker_pb2.ConnectRequest(hand_over=hand_over))

    def listen(self, handle: Handle, listener: GroupListener) -> bool:
        """From now on `listener` is told of this request; False if it has ended there."""
        if handle not in self._listeners:
            return False
        self._listeners[handle] = listener
        return True

    def release(self, handle: Handle) -> None:
        """Nothing more is wanted of it. Idempotent; its listener is told nothing from now on."""
        if self._listeners.pop(handle, None) is not None and self.connected:
            self._enqueue(worker_pb2.ConnectRequest(release=worker_pb2.Release(handle=handle)))

    async def _run(self) -> None:
        while True:
            try:
                await self._connect_once()
            except grpc.aio.AioRpcError as error:
                failure = error_from_rpc(error)
                log = _log.warning if needs_mending(failure) else _log.info
                log("worker stream failed", worker_id=self._info.worker_id, error=failure.message)
            except (Unavailable, TimeoutError) as error:
                _log.info("worker stream failed", worker_id=self._info.worker_id, error=str(error) or "no answer")
            except asyncio.CancelledError:
                # grpc.aio raises this, too, where the *worker* ends the stream with CANCELLED.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(_MAX_BACKOFF_S, self._backoff_s * 2)

    async def _connect_once(self) -> None:
        """Opens a stream; returns when the stream has ended."""
        async with open_channel(self._info.address, self._credentials) as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).Connect(metadata=self._credentials.metadata())
            try:
                async with asyncio.timeout(_HELLO_TIMEOUT_S):
                    await self._shake_hands(call)
                self._backoff_s = _FIRST_BACKOFF_S
                self.connected = True
                self._on_change()
                sender = asyncio.create_task(self._send_queued(call))
                try:
                    while isinstance(response := await call.read(), worker_pb2.ConnectResponse):
                        self._dispatch(response)
                finally:
                    sender.cancel()
            finally:
                call.cancel()
                self._lose_all()

    async def _shake_hands(self, call: _Call) -> None:
        """Raises Unavailable if another life of the worker answers, or none."""
        hello = worker_pb2.RouterHello(router_incarnation=self._router)
        await call.write(worker_pb2.ConnectRequest(hello=hello))
        answer = await call.read()
        if not isinstance(answer, worker_pb2.ConnectResponse):
            raise Unavailable(f"worker {self._info.worker_id} closed the stream", Reason.WORKER_LOST)
        if answer.hello.incarnation != self._info.incarnation:
            raise Unavailable(f"another incarnation answers for {self._info.worker_id}", Reason.WORKER_LOST)

    async def _send_queued(self, call: _Call) -> None:
        try:
            while True:
                await self._has_outgoing.wait()
                while self._outgoing:
                    await call.write(self._outgoing.popleft())
                self._has_outgoing.clear()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the stream is gone; who reads from it learns the same and ends the connection

    def _dispatch(self, response: worker_pb2.ConnectResponse) -> None:
        kind = response.WhichOneof("message")
        if kind == "step_outputs":
            self._pass_on(response.step_outputs)
        elif kind == "failed":
            self._fail(Handle(response.failed.handle), error_from_failed(response.failed))
        elif kind == "cache_changes":
            changes = response.cache_changes
            self.held.change(changes.stored, changes.removed, cleared=changes.cleared)
        elif kind == "waiting":
            for handle in response.waiting.handles:
                if (listener := self._listeners.get(Handle(handle))) is not None:
                    listener.waiting(self._info)
        elif kind in {"reserved", "prefill_started", "prompt_logprobs", "prefill_done", "handoff_done", "leaving"}:
            self._tell(kind, getattr(response, kind))

    def _pass_on(self, step: worker_pb2.StepOutputs) -> None:
        """Passes on the tokens of a step. Raises Unavailable if the message does not say whose tokens these are."""
        try:
            deltas = deltas_from_proto(step)
        except InvalidOutput as error:
            raise Unavailable(f"worker {self._info.worker_id} told {error.message}", Reason.WORKER_LOST) from error
        for handle, delta in deltas:
            self._tell_tokens(handle, delta)

    def _tell_tokens(self, handle: Handle, delta: TokenDelta) -> None:
        """As `_tell`."""
        listener = self._listeners.get(handle)
        if listener is None:
            return
        try:
            listener.tokens(self._info, delta)
        except Exception as error:  # noqa: BLE001
            self._fail_one(handle, listener, error)

    def _tell(self, kind: str, message: Any) -> None:
        """Messages for a released request are late, and no-ops."""
        listener = self._listeners.get(message.handle)
        if listener is None:
            return
        try:
            match kind:
                case "reserved":
                    listener.reserved(self._info, message.ticket, message.kv_endpoint)
                case "prefill_started" | "leaving":
                    getattr(listener, kind)(self._info)
                case "prompt_logprobs":
                    listener.prompt_logprobs(
                        self._info, message.offset, tuple(map(logprobs_from_proto, message.logprobs))
                    )
                case "prefill_done":
                    times_s = message.queue_seconds, message.prefill_seconds
                    listener.prefill_done(self._info, *times_s, message.cached_tokens)
                case "handoff_done":
                    route = KvRoute(message.transport, message.passed_over)
                    listener.handoff_done(self._info, message.transfer_bytes, message.transfer_seconds, route)
        except Exception as error:  # noqa: BLE001
            self._fail_one(message.handle, listener, error)

    def _fail_one(self, handle: Handle, listener: GroupListener, error: Exception) -> None:
        """What a worker told of a request was not taken. That must not end the stream that all others live in."""
        worker_id = self._info.worker_id
        self.release(handle)
        if isinstance(error, InvalidOutput):
            _log.warning("a worker told what cannot be", worker_id=worker_id, error=error.message)
            listener.failed(self._info, InvalidOutput(f"worker {worker_id} told {error.message}"))
        else:
            _log.error("a worker's message failed", worker_id=worker_id, handle=handle, exc_info=error)
            listener.failed(self._info, InternalError("a worker's message could not be handled"))

    def _fail(self, handle: Handle, error: TandemError) -> None:
        listener = self._listeners.pop(handle, None)
        if listener is not None:
            listener.failed(self._info, error)

    def _new_handle(self, listener: GroupListener) -> Handle:
        handle = Handle(next(self._handles))
        self._listeners[handle] = listener
        return handle

    def _ask(self, handle: Handle, request: worker_pb2.ConnectRequest) -> Handle:
        if self.connected:
            self._enqueue(request)
        else:
            self._fail(handle, self._lost())
        return handle

    def _enqueue(self, request: worker_pb2.ConnectRequest) -> None:
        self._outgoing.append(request)
        self._has_outgoing.set()

    def _lose_all(self) -> None:
        """The stream is gone: fails all requests in the stream."""
        self._outgoing.clear()
        self.held.forget()
        self.connected = False
        self._on_change()
        for handle in list(self._listeners):
            self._fail(handle, self._lost())

    def _lost(self) -> Unavailable:
        return Unavailable(f"worker {self._info.worker_id} was lost", Reason.WORKER_LOST)
