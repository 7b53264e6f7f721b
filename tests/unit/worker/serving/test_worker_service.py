from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from engine.step import SampledToken
from shell.rpc.server import RpcServer, Service
from tandem.errors import Overloaded
from tandem.types import FinishReason, GroupSpec, Handle, Incarnation, TokenId, TokenLogprobs, WaitReason
from tandem.v1 import worker_pb2, worker_pb2_grpc
from worker.serving.router_session import RouterSession
from worker.serving.service import SERVICE_NAME, WorkerServicer

Serve = Callable[..., Awaitable[tuple[RpcServer, grpc.aio.Channel]]]
Call = Any  # grpc.aio.StreamStreamCall[worker_pb2.ConnectRequest, worker_pb2.ConnectResponse]

TIMEOUT_S = 20
ROUTER = "router-1"


def say(
    session: RouterSession, handle: int, offset: int, token_id: int, finish_reason: FinishReason | None = None
) -> None:
    session.token(Handle(handle), 0, offset, SampledToken(TokenId(token_id), None), finish_reason)


class RecordingCore:
    """Notes what it is asked; `refusal` is raised by the next reserve."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.max_local_tokens: list[int | None] = []
        """Of each reserve."""
        self.sessions: list[RouterSession] = []
        self.lost: list[RouterSession] = []
        self.router_was_lost = asyncio.Event()
        self.refusal: Exception | None = None

    def reserve(
        self,
        session: RouterSession,
        handle: Handle,
        spec: GroupSpec,
        local_prefill: bool,
        max_local_tokens: int | None = None,
    ) -> None:
        self.max_local_tokens.append(max_local_tokens)
        self.calls.append(("reserve", handle, spec.request_id, local_prefill))
        self.sessions.append(session)
        if self.refusal is not None:
            raise self.refusal
        session.reserved(handle, b"ticket", b"endpoint")

    def prefill(self, session: RouterSession, handle: Handle, spec: GroupSpec, destination: str) -> None:
        self.calls.append(("prefill", handle, spec.request_id, destination))
        session.prefill_started(handle)

    def grant(self, session: RouterSession, handle: Handle, ticket: bytes, kv_endpoint: bytes) -> None:
        self.calls.append(("grant", handle, ticket, kv_endpoint))
        session.waiting(WaitReason.HANDOFF, [handle])
        session.prefill_done(handle, 0.5, 0.25)
        say(session, handle, 0, 5)
        session.handoff_done(handle, 4096, 0.125)

    def release(self, session: RouterSession, handle: Handle) -> None:
        self.calls.append(("release", handle))

    def router_lost(self, session: RouterSession) -> None:
        self.lost.append(session)
        self.router_was_lost.set()


@pytest.fixture
def core() -> RecordingCore:
    return RecordingCore()


@pytest.fixture
async def worker(serve: Serve, core: RecordingCore) -> tuple[RpcServer, grpc.aio.Channel]:
    """A worker with `core`."""
    servicer = WorkerServicer(core, Incarnation("worker-life"), hello_timeout_s=3.0)
    return await serve(
        Service(
            SERVICE_NAME,
            lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server),
            long_lived=True,
        )
    )


@pytest.fixture
def connect(worker: tuple[RpcServer, grpc.aio.Channel]) -> Callable[[], Call]:
    """Opens one more stream to the worker."""
    _, channel = worker
    return lambda: worker_pb2_grpc.WorkerServiceStub(channel).Connect(timeout=TIMEOUT_S)


@pytest.fixture
async def stream(connect: Callable[[], Call]) -> Call:
    """A stream past its hellos."""
    call = connect()
    await call.write(worker_pb2.ConnectRequest(hello=worker_pb2.RouterHello(router_incarnation=ROUTER)))
    assert (await call.read()).hello.incarnation == "worker-life"
    return call


def reserve(handle: int, *, local_prefill: bool = False) -> worker_pb2.ConnectRequest:
    group = worker_pb2.Group(request_id=f"r-{handle}", prompt_token_ids=[1], choices=[worker_pb2.GroupChoice()])
    return worker_pb2.ConnectRequest(
        reserve=worker_pb2.Reserve(handle=handle, group=group, local_prefill=local_prefill)
    )


def release(handle: int) -> worker_pb2.ConnectRequest:
    return worker_pb2.ConnectRequest(release=worker_pb2.Release(handle=handle))


async def test_requests_reach_the_core_and_its_answers_the_router(core: RecordingCore, stream: Call) -> None:
    await stream.write(reserve(1, local_prefill=True))
    reserved = (await stream.read()).reserved
    prefill = worker_pb2.Prefill(handle=2, group=worker_pb2.Group(request_id="r-2"), destination="decode-1")
    await stream.write(worker_pb2.ConnectRequest(prefill=prefill))
    started = (await stream.read()).prefill_started
    grant = worker_pb2.Grant(handle=2, ticket=b"t", kv_endpoint=b"e")
    await stream.write(worker_pb2.ConnectRequest(grant=grant))
    prefill_done = (await stream.read()).prefill_done
    first = (await stream.read()).step_outputs
    handoff_done = (await stream.read()).handoff_done
    waiting = (await stream.read()).waiting

    assert core.calls == [("reserve", 1, "r-1", True), ("prefill", 2, "r-2", "decode-1"), ("grant", 2, b"t", b"e")]
    assert started.handle == 2
    assert (waiting.reason, list(waiting.handles)) == (worker_pb2.WAIT_REASON_HANDOFF, [2])
    assert (reserved.handle, reserved.ticket, reserved.kv_endpoint) == (1, b"ticket", b"endpoint")
    assert (list(first.handles), list(first.token_ids)) == ([2], [5])
    assert (prefill_done.queue_seconds, prefill_done.prefill_seconds) == (0.5, 0.25)
    assert (handoff_done.transfer_bytes, handoff_done.transfer_seconds) == (4096, 0.125)


async def test_how_much_a_decode_worker_may_compute_reaches_the_core(core: RecordingCore, stream: Call) -> None:
    for handle, most in enumerate((None, 0, 64), start=1):
        request = reserve(handle, local_prefill=True)
        if most is not None:
            request.reserve.max_local_tokens = most
        await stream.write(request)
        await stream.read()
    assert core.max_local_tokens == [None, 0, 64]


async def test_a_steps_tokens_arrive_in_one_message(core: RecordingCore, stream: Call) -> None:
    for handle in (1, 2):
        await stream.write(reserve(handle))
        await stream.read()
    say(core.sessions[0], 1, 1, 5, FinishReason.STOP)
    say(core.sessions[0], 2, 1, 6)

    step = (await stream.read()).step_outputs

    assert (list(step.handles), list(step.offsets), list(step.token_ids)) == ([1, 2], [1, 1], [5, 6])
    assert [each.row for each in step.extras] == [0]


async def test_a_refusal_fails_one_sequence_and_not_the_stream(core: RecordingCore, stream: Call) -> None:
    core.refusal = Overloaded("pool is full")
    await stream.write(reserve(1))
    failed = (await stream.read()).failed
    core.refusal = ValueError("a bug")
    await stream.write(reserve(2))
    bug = (await stream.read()).failed
    core.refusal = None
    await stream.write(reserve(3))

    assert (failed.handle, failed.reason, failed.retryable) == (1, "QUEUE_FULL", True)
    assert (bug.handle, bug.reason, bug.retryable) == (2, "INTERNAL", False)
    assert "a bug" not in bug.message
    assert (await stream.read()).reserved.handle == 3


async def test_nothing_is_told_of_what_was_released(core: RecordingCore, stream: Call) -> None:
    await stream.write(reserve(1))
    await stream.read()
    for request in (release(1), release(1), release(99), reserve(2)):
        await stream.write(request)
    assert (await stream.read()).reserved.handle == 2
    (session, _) = core.sessions
    say(session, 1, 0, 5)
    session.failed(Handle(1), Overloaded("late"))
    say(session, 2, 0, 6)

    assert list((await stream.read()).step_outputs.handles) == [2]
    assert core.calls.count(("release", 1)) == 2, "release is the core's to make idempotent"


@pytest.mark.parametrize("end", ["cancel", "half-close", "protocol error", "server stops"])
async def test_whatever_ends_the_stream_the_router_is_lost_once(
    core: RecordingCore, stream: Call, end: str, worker: tuple[RpcServer, grpc.aio.Channel]
) -> None:
    await stream.write(reserve(1))
    await stream.read()

    if end == "cancel":
        stream.cancel()
    elif end == "half-close":
        await stream.done_writing()
    elif end == "protocol error":
        await stream.write(worker_pb2.ConnectRequest())
    else:
        await worker[0].drain(TIMEOUT_S)

    await asyncio.wait_for(core.router_was_lost.wait(), TIMEOUT_S)
    assert core.lost == core.sessions


async def test_a_stream_blocked_by_a_router_that_does_not_read_ends_with_it(core: RecordingCore, stream: Call) -> None:
    await stream.write(reserve(1))
    await stream.read()
    (session,) = core.sessions
    logprobs = TokenLogprobs(TokenId(1), -1.0, tuple((TokenId(2**31), -1.0) for _ in range(1000)))
    for offset in range(1600):  # far more than the transport buffers
        session.token(Handle(1), 0, offset, SampledToken(TokenId(1), logprobs), None)
        if not offset % 8:
            await asyncio.sleep(0)

    stream.cancel()

    await asyncio.wait_for(core.router_was_lost.wait(), TIMEOUT_S)
    assert core.lost == [session]


@pytest.mark.parametrize(
    "first", [release(1), worker_pb2.ConnectRequest(hello=worker_pb2.RouterHello()), worker_pb2.ConnectRequest()]
)
async def test_a_stream_must_open_with_hello(
    core: RecordingCore, connect: Callable[[], Call], first: worker_pb2.ConnectRequest
) -> None:
    call = connect()
    await call.write(first)

    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (core.calls, core.lost) == ([], [])


async def test_a_stream_that_says_nothing_is_ended(core: RecordingCore, connect: Callable[[], Call]) -> None:
    assert await connect().code() is grpc.StatusCode.INVALID_ARGUMENT
    assert core.lost == []


@pytest.mark.parametrize(
    "request_message", [reserve(1), worker_pb2.ConnectRequest(hello=worker_pb2.RouterHello(router_incarnation="again"))]
)
async def test_a_handle_in_use_and_a_second_hello_are_protocol_errors(
    stream: Call, request_message: worker_pb2.ConnectRequest
) -> None:
    await stream.write(reserve(1))
    await stream.read()

    await stream.write(request_message)

    assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_routers_do_not_hear_of_each_other(core: RecordingCore, connect: Callable[[], Call]) -> None:
    calls = [connect(), connect()]
    for call in calls:
        await call.write(worker_pb2.ConnectRequest(hello=worker_pb2.RouterHello(router_incarnation=ROUTER)))
        await call.read()
        await call.write(reserve(1))
        await call.read()
    say(core.sessions[1], 1, 0, 5)
    say(core.sessions[0], 1, 0, 6)

    assert [list((await call.read()).step_outputs.token_ids) for call in calls] == [[6], [5]]
