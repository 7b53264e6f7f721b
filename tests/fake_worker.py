"""A worker that speaks the protocol but computes nothing. Built on the protos alone, not on any worker's code.

Its tokens are a function of prompt, choice and position, so that any fake worker continues any
request exactly. Each stage can be held, and each failure provoked, by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

from tandem.convert import (
    failed_to_proto,
    group_from_proto,
    info_to_proto,
    load_to_proto,
    logprobs_to_proto,
)
from tandem.errors import PrefixNotHeld, TandemError
from tandem.rpc.channel import open_channel
from tandem.types import (
    FinishReason,
    GroupSpec,
    Handle,
    PoolCounts,
    TokenDelta,
    TokenId,
    TokenLogprobs,
    WorkerInfo,
    WorkerLoad,
)
from tandem.v1 import registry_pb2, registry_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.fake_model import drawn_with_prompt, prompt_logprobs_of, token_at
from tests.fake_stream import Stream

BEAT_S = 0.05
RETRY_S = 0.05


Key = tuple[Stream, Handle]


@dataclass(slots=True)
class Running:
    """One request here."""

    spec: GroupSpec
    offsets: dict[int, int]
    """Offset of the next token of each choice that is not finished."""
    grant: worker_pb2.Grant | None = None
    """Where its KV goes, once that was told."""


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker of either role. Stages that are held do not happen until let go.

    Stages: "prefill" (PrefillStarted), "reserve", "first" (PrefillDone and first tokens), "attach", "handoff_word",
    "decode", "hand_over".
    """

    def __init__(self, info: WorkerInfo, peers: dict[str, FakeWorker]) -> None:
        """`peers`: all workers by name; decode workers are reached through it."""
        self.info = info
        self.sequences: dict[Key, Running] = {}
        self.specs: list[GroupSpec] = []
        self.num_releases = 0
        self.num_drain_orders = 0
        self.cached_tokens = 0
        """Of every prompt, as it is told."""
        self.load = WorkerLoad(0, 0, 0, 0, PoolCounts(64, 64, 0, 0, 0, 0, 16, 0), 0, draining=False)
        self.hand_overs: list[worker_pb2.HandOver] = []
        """What it was told to hand over."""
        self.local_limits: list[int] = []
        """Most tokens that it was to compute by itself for holding the rest, of each request of that kind."""
        self.forgets = False
        """Whether it fails such requests: its cache lacks more than it has said."""
        self._streams: set[Stream] = set()
        self._peers = peers
        self._held: set[str] = set()
        self._pause_at: int | None = None
        self._sickness: TandemError | None = None
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._announcing: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is held for any router."""
        return not self.sequences

    @property
    def offsets(self) -> list[int]:
        """How far each unfinished choice has come."""
        return [offset for running in self.sequences.values() for offset in running.offsets.values()]

    def hold(self, *stages: str) -> None:
        """These stages wait from now on."""
        self._held.update(stages)

    def pause_at(self, offset: int) -> None:
        """Decodes up to this many tokens of each choice."""
        self._pause_at = offset

    def let_go(self) -> None:
        """Nothing waits any more."""
        self._held.clear()
        self._pause_at = None
        self._notify()

    def fall_ill(self, error: TandemError | None) -> None:
        """Fails at once with `error` whatever it is asked for from now on; None = is well again."""
        self._sickness = error

    def say(self, offset: int, *tokens: int, finish: FinishReason | None = None, index: int = 0) -> None:
        """Sends tokens of its one request that the fake model would not."""
        ((stream, handle),) = self.sequences
        stream.tokens(handle, TokenDelta(offset, tuple(map(TokenId, tokens)), (), finish, index))

    def say_prompt_logprobs(self, offset: int, *tokens: int) -> None:
        """Tells some of its one request that need not be true; each as the fake model would."""
        ((stream, handle),) = self.sequences
        scores = [logprobs_to_proto(TokenLogprobs(TokenId(each), -0.25 * each)) for each in tokens]
        stream.say(prompt_logprobs=worker_pb2.PromptLogprobs(handle=handle, offset=offset, logprobs=scores))

    def tell_cache(self, stored: Sequence[int] = (), removed: Sequence[int] = (), *, cleared: bool = False) -> None:
        """Tells every router so of its cache."""
        changes = worker_pb2.CacheChanges(stored=stored, removed=removed, cleared=cleared)
        for stream in self._streams:
            stream.say(cache_changes=changes)

    def fail_all(self, error: TandemError) -> None:
        """Gives up everything it runs."""
        for stream, handle in list(self.sequences):
            stream.say(failed=failed_to_proto(handle, error))
            del self.sequences[stream, handle]
        self._notify()

    # --- the stream ---

    async def Connect(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.ConnectRequest], context: Any
    ) -> None:
        stream = Stream()
        stream.say(hello=worker_pb2.WorkerHello(incarnation=self.info.incarnation))
        writing = asyncio.create_task(self._write(stream, context))
        self._streams.add(stream)
        try:
            async for request in request_iterator:
                self._take(stream, request)
        finally:
            writing.cancel()
            self._streams.discard(stream)
            for key in [key for key in self.sequences if key[0] is stream]:
                del self.sequences[key]
            self._notify()

    @staticmethod
    async def _write(stream: Stream, context: Any) -> None:
        while True:
            await context.write(await stream.messages.get())

    def _take(self, stream: Stream, request: worker_pb2.ConnectRequest) -> None:
        kind = request.WhichOneof("message")
        if self._sickness is not None and kind in {"reserve", "prefill"}:
            key = self._begin(stream, getattr(request, kind))
            del self.sequences[key]
            stream.say(failed=failed_to_proto(key[1], self._sickness))
        elif kind == "reserve":
            key = self._begin(stream, request.reserve)
            if request.reserve.HasField("max_local_tokens"):
                self.local_limits.append(request.reserve.max_local_tokens)
                if self.forgets:
                    del self.sequences[key]
                    stream.say(failed=failed_to_proto(key[1], PrefixNotHeld("0 tokens are held")))
                    return
            self._spawn(self._reserve(key, request.reserve.local_prefill))
        elif kind == "prefill":
            key = self._begin(stream, request.prefill)
            self._spawn(self._prefill(key))
        elif kind == "grant" and (running := self.sequences.get((stream, Handle(request.grant.handle)))) is not None:
            running.grant = request.grant
            self._notify()
        elif kind == "hand_over":
            self._spawn(self._give_away((stream, Handle(request.hand_over.handle)), request.hand_over))
        elif kind == "release":
            self.num_releases += 1
            self.sequences.pop((stream, Handle(request.release.handle)), None)
            self._notify()

    def _begin(self, stream: Stream, message: worker_pb2.Reserve | worker_pb2.Prefill) -> Key:
        spec = group_from_proto(message.group)
        self.specs.append(spec)
        key = stream, Handle(message.handle)
        self.sequences[key] = Running(spec, {each.index: len(each.output_token_ids) for each in spec.choices})
        return key

    # --- what it does with a request ---

    async def _reserve(self, key: Key, local_prefill: bool) -> None:
        stream, handle = key
        if not await self._passes("reserve", key):
            return
        ticket, endpoint = (b"", b"") if local_prefill else (str(handle).encode(), self.info.worker_id.encode())
        stream.say(reserved=worker_pb2.Reserved(handle=handle, ticket=ticket, kv_endpoint=endpoint))
        if local_prefill and await self._passes("first", key):
            self._tell_first(key, self.sequences[key].spec, self._first_tokens(key))
            self._spawn(self._decode(key))

    async def _prefill(self, key: Key) -> None:
        stream, handle = key
        if not await self._passes("prefill", key):
            return
        stream.say(prefill_started=worker_pb2.PrefillStarted(handle=handle))
        spec, first = self.sequences[key].spec, self._first_tokens(key)
        goes_on = bool(self.sequences[key].offsets)
        handing_over = asyncio.create_task(self._hand_over(key))
        try:
            if await self._passes("first", key):
                self._tell_first(key, spec, first)
            await handing_over
        finally:
            handing_over.cancel()
        if goes_on and await self._passes("handoff_word", key):
            done = worker_pb2.HandoffDone(handle=handle, transfer_bytes=4096, transfer_seconds=0.125)
            stream.say(handoff_done=done)

    async def _hand_over(self, key: Key) -> None:
        """Ends when the KV was attached, or the request is gone."""
        running = self.sequences[key]
        while running.grant is None and key in self.sequences:
            await self._changed.wait()
        if running.grant is not None and await self._passes("attach", key) and running.offsets:
            self._peers[running.grant.kv_endpoint.decode()].attach(running.grant.ticket)

    def attach(self, ticket: bytes) -> None:
        """The prompt's KV is here: decodes from now on."""
        for key in [key for key in self.sequences if str(key[1]).encode() == ticket]:
            self._first_tokens(key)
            self._spawn(self._decode(key))

    def offer_all(self) -> None:
        """It drains, and would hand over what it runs."""
        for stream, handle in self.sequences:
            stream.say(leaving=worker_pb2.Leaving(handle=handle))

    async def _give_away(self, key: Key, wanted: worker_pb2.HandOver) -> None:
        """Hands a running request over; decodes no further from the moment on that it is asked to."""
        if key not in self.sequences:
            return
        running, stream = self.sequences[key], key[0]
        self.hand_overs.append(wanted)
        offsets, running.offsets = running.offsets, {}
        if await self._passes("hand_over", key):
            self._peers[wanted.kv_endpoint.decode()].take_over(wanted.ticket, offsets)
            stream.say(handoff_done=worker_pb2.HandoffDone(handle=key[1], transfer_bytes=2048, transfer_seconds=0.0625))

    def take_over(self, ticket: bytes, offsets: dict[int, int]) -> None:
        """The KV of a request that ran elsewhere is here, with all its tokens: decodes from there on."""
        for key in [key for key in self.sequences if str(key[1]).encode() == ticket]:
            self.sequences[key].offsets = offsets
            self._spawn(self._decode(key))

    def _first_tokens(self, key: Key) -> list[TokenDelta]:
        running = self.sequences[key]
        return [self._next(running, each.index) for each in drawn_with_prompt(running.spec)]

    def _tell_first(self, key: Key, spec: GroupSpec, first: Sequence[TokenDelta]) -> None:
        stream, handle = key
        for part in prompt_logprobs_of(spec):
            stream.say(prompt_logprobs=worker_pb2.PromptLogprobs(handle=handle, offset=part[0], logprobs=part[1]))
        done = worker_pb2.PrefillDone(
            handle=handle, queue_seconds=0.25, prefill_seconds=0.5, cached_tokens=self.cached_tokens
        )
        stream.say(prefill_done=done)
        if first:
            stream.tokens(handle, *first)

    async def _decode(self, key: Key) -> None:
        stream, handle = key
        while await self._passes("decode", key):
            running = self.sequences[key]
            due = [i for i, offset in running.offsets.items() if self._pause_at is None or offset < self._pause_at]
            if due:
                stream.tokens(handle, *[self._next(running, index) for index in due])
                await asyncio.sleep(0)
            elif running.offsets:
                await self._changed.wait()
            else:
                return

    @staticmethod
    def _next(running: Running, index: int) -> TokenDelta:
        spec, offset = running.spec, running.offsets[index]
        token = token_at(spec.prompt_token_ids, offset, index)
        finish = FinishReason.STOP if token in spec.sampling.end_token_ids else None
        if finish is None and offset + 1 == spec.sampling.max_tokens:
            finish = FinishReason.LENGTH
        if finish is None:
            running.offsets[index] += 1
        else:
            del running.offsets[index]
        logprobs = () if spec.sampling.logprobs is None else (TokenLogprobs(token, -0.5, ((token, -0.5),)),)
        return TokenDelta(offset, (token,), logprobs, finish, index)

    async def _passes(self, stage: str, key: Key) -> bool:
        """Waits while the stage is held; False if the request is gone by then."""
        while stage in self._held and key in self.sequences:
            await self._changed.wait()
        return key in self.sequences

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- its life ---

    async def start(self, router_address: str) -> None:
        """Serves and announces itself."""
        port = await self._serve("127.0.0.1:0")
        self.info = replace(self.info, address=f"127.0.0.1:{port}")
        self.announce(router_address)

    async def serve_again(self) -> None:
        """On the same address, in the same life."""
        await self._serve(self.info.address)

    async def _serve(self, listen: str) -> int:
        # As a real worker's: a router may ping often, and nobody shares the port.
        options = [("grpc.http2.max_ping_strikes", 0), ("grpc.so_reuseport", 0)]
        self._server = grpc.aio.server(options=options)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(listen)
        await self._server.start()
        return port

    def announce(self, router_address: str) -> None:
        """Keeps a registration."""
        self._announcing = asyncio.create_task(self._keep_registered(router_address))

    async def _keep_registered(self, router_address: str) -> None:
        while True:
            async with open_channel(router_address) as channel:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # refused, or ended
                    await self._register(channel)
            await asyncio.sleep(RETRY_S)

    async def _register(self, channel: grpc.aio.Channel) -> None:
        call: Any = registry_pb2_grpc.RegistryServiceStub(channel).Register()
        await call.write(registry_pb2.RegisterRequest(info=info_to_proto(self.info)))
        await call.write(registry_pb2.RegisterRequest(load=load_to_proto(self.load)))
        beating = asyncio.create_task(self._beat(call))
        try:
            while isinstance(response := await call.read(), registry_pb2.RegisterResponse):
                self.num_drain_orders += response.drain
        finally:
            beating.cancel()
            call.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def _beat(self, call: Any) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await call.write(registry_pb2.RegisterRequest(load=load_to_proto(self.load)))

    async def fall_silent(self) -> None:
        """Ends its registration; its service stands."""
        if self._announcing is not None:
            self._announcing.cancel()
            await asyncio.gather(self._announcing, return_exceptions=True)

    async def stop_serving(self) -> None:
        """Cuts every stream, as a dead process does; its registration stands."""
        if self._server is not None:
            await self._server.stop(None)
        while self._streams:
            await self._changed.wait()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.sequences.clear()

    async def die(self) -> None:
        """Ends at once."""
        await self.stop_serving()
        await self.fall_silent()
