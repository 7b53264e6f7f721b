"""The other ends of `bench.router_tokens`, each a process: workers without an engine, clients, a bare server.

    python -m bench.token_stubs workers JSON    registers, answers Reserve at once, then makes steps at a fixed rate
    python -m bench.token_stubs clients JSON    opens streams and counts what it reads, without decoding it
    python -m bench.token_stubs floor JSON      a bare grpc.aio server: the least that one message per token costs

Each says in lines of JSON on standard output what happened.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import grpc.aio
import uvloop

from models.files.checkpoint import read_checkpoint
from shell.rpc.server import RpcServer, Service
from tandem.rpc.channel import keepalive_options, open_channel
from tandem.types import PoolCounts, Role, WorkerId, WorkerInfo, WorkerLoad, new_incarnation
from tandem.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from worker.serving.announcer import Announcer

GENERATE = "/tandem.v1.InferenceService/Generate"
_PROMPT = "A router passes tokens on."
_TEXT = "What a worker draws, the router checks, turns into text and writes to whoever waits for it; and so on. "
_LOAD = WorkerLoad(0, 0, 0, 0, PoolCounts(1 << 20, 1 << 20, 0, 0, 0, 0, 16, 0), 0, draining=False)


@dataclass(frozen=True, slots=True)
class Load:
    """What one run consists of."""

    model: str
    target: str
    """Where clients call: the router, or the bare server."""
    workers: int
    streams: int
    """Of all workers together."""
    steps: int
    """Tokens of each stream."""
    interval_s: float
    """Between a worker's steps; the workers' steps are spread over it."""
    connections: int
    """Of the clients."""
    routers: tuple[str, ...] = ()
    """Where workers register, if that is not `target`: each router calls every worker."""

    @property
    def argument(self) -> str:
        """As the processes take it."""
        return json.dumps(asdict(self))


def token_ids(model: str) -> list[int]:
    """Of some text, with the model's tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(read_checkpoint(model).folder / "tokenizer.json"))
    return list(tokenizer.encode(_TEXT).ids)


class _Session:
    """The stream of one router process; its requests run in the order in which they came."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.handles: list[int] = []

    async def say(self, **message: Any) -> None:
        await self._context.write(worker_pb2.ConnectResponse(**message))

    async def step(self, offset: int, token_id: int, *, is_last: bool) -> None:
        """One token of each request."""
        count = len(self.handles)
        step = worker_pb2.StepOutputs(handles=self.handles, offsets=[offset] * count, token_ids=[token_id] * count)
        for row in range(count) if is_last else ():
            step.extras.add(row=row, finish_reason=inference_pb2.FINISH_REASON_LENGTH)
        await self.say(step_outputs=step)


class _Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Answers each process of one router."""

    def __init__(self, index: int, load: Load, on_connect: Callable[[], None], on_reserve: Callable[[], None]) -> None:
        self._last = load.steps - 1
        self._on_connect, self._on_reserve = on_connect, on_reserve
        self._sessions: list[_Session] = []
        checkpoint = read_checkpoint(load.model)
        self.info = WorkerInfo(
            worker_id=WorkerId(f"stub-{index}"),
            incarnation=new_incarnation(),
            role=Role.DECODE,
            address="",
            model=checkpoint.name,
            config_fingerprint=checkpoint.config_fingerprint,
            model_fingerprint="m",
            layout_fingerprint="l",
            transports=("tcp",),
            local_prefill_tokens=None,
            max_sequence_tokens=1 << 20,
            pid=1,
            device="stub",
        )

    async def Connect(self, request_iterator: AsyncIterator[worker_pb2.ConnectRequest], context: Any) -> None:  # noqa: N802
        session = _Session(context)
        self._sessions.append(session)
        await session.say(hello=worker_pb2.WorkerHello(incarnation=self.info.incarnation))
        self._on_connect()
        async for request in request_iterator:
            if request.WhichOneof("message") == "reserve":
                handle = request.reserve.handle
                await session.say(reserved=worker_pb2.Reserved(handle=handle))
                await session.say(prefill_done=worker_pb2.PrefillDone(handle=handle))
                session.handles.append(handle)
                self._on_reserve()

    async def step(self, offset: int, token_id: int) -> None:
        """One token of each request."""
        for session in self._sessions:
            if session.handles:
                await session.step(offset, token_id, is_last=offset == self._last)

    async def register(self, routers: tuple[str, ...]) -> None:
        """Serves, and holds a lease at each router until cancelled."""
        service = Service(
            "tandem.v1.WorkerService",
            lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server),
            long_lived=True,
        )
        server = RpcServer("127.0.0.1:0", [service], announce_s=0)
        info = replace(self.info, address=f"127.0.0.1:{await server.start()}")
        await Announcer(routers, info, lambda: _LOAD, lambda: None).run()


async def workers(load: Load) -> None:
    """Until it is ended from outside. Says `{"connected": N}`; `{"begin": s}` and `{"end": s}` around the steps."""
    connected, reserved = asyncio.Semaphore(0), asyncio.Semaphore(0)
    stubs = [_Worker(index, load, connected.release, reserved.release) for index in range(load.workers)]
    routers = tuple(load.routers) or (load.target,)
    registrations = [asyncio.create_task(stub.register(routers)) for stub in stubs]
    ids = token_ids(load.model)
    for _ in range(load.workers * len(routers)):
        await connected.acquire()
    _say(connected=load.workers)
    for _ in range(load.streams):
        await reserved.acquire()
    await asyncio.sleep(1.0)  # what the router still has to do for the requests is not of the steps
    _say(begin=time.monotonic())
    began_s = time.monotonic()
    turn_s = load.interval_s / len(stubs)
    for offset in range(load.steps):
        for index, stub in enumerate(stubs):
            due_s = began_s + offset * load.interval_s + index * turn_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await stub.step(offset, ids[offset % len(ids)])
    _say(end=time.monotonic())
    await asyncio.gather(*registrations, return_exceptions=True)


async def clients(load: Load) -> None:
    """Opens all streams, reads them to their ends; says how many messages and tokens there were."""
    channels = [open_channel(load.target, more_options=[("bench.connection", i)]) for i in range(load.connections)]
    request = inference_pb2.GenerateRequest(
        text=_PROMPT, sampling=inference_pb2.SamplingParams(max_tokens=load.steps, ignore_eos=True)
    ).SerializeToString()
    streams = [_read(channels[index % len(channels)], request) for index in range(load.streams)]
    read = await asyncio.gather(*streams)
    messages = sum(each[0] for each in read)
    _say(messages=messages, tokens=sum(each[1] for each in read))
    for channel in channels:
        await channel.close()


async def _read(channel: grpc.aio.Channel, request: bytes) -> tuple[int, int]:
    """Messages and tokens of one stream."""
    open_stream: Any = channel.unary_stream(GENERATE)
    call = open_stream(request)
    count, last = 0, b""
    while (message := await call.read()) is not grpc.aio.EOF:
        count, last = count + 1, message
    return count, inference_pb2.GenerateResponse.FromString(last).usage.completion_tokens


async def floor(load: Load) -> None:
    """Writes to each stream one message per step, all from one task's wake-up each, as a router would do at best."""
    streams: list[asyncio.Queue[bytes]] = []
    started = asyncio.Semaphore(0)
    message = inference_pb2.GenerateResponse(request_id="ab" * 16, text=" router", token_ids=[300])
    last = inference_pb2.GenerateResponse(usage=inference_pb2.Usage(completion_tokens=load.steps))

    async def write(request: bytes, context: Any) -> None:
        stream: asyncio.Queue[bytes] = asyncio.Queue()
        streams.append(stream)
        started.release()
        for _ in range(load.steps):
            await context.write(await stream.get())

    server = grpc.aio.server(options=[*keepalive_options(), ("grpc.max_concurrent_streams", 4096)])
    method: Any = grpc.unary_stream_rpc_method_handler(cast(Any, write))
    service, name = GENERATE[1:].split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
    _say(port=server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    for _ in range(load.streams):
        await started.acquire()
    await asyncio.sleep(1.0)
    _say(begin=time.monotonic())
    began_s = time.monotonic()
    for step in range(load.steps):
        await asyncio.sleep(max(0.0, began_s + step * load.interval_s - time.monotonic()))
        for stream in streams:
            stream.put_nowait((last if step == load.steps - 1 else message).SerializeToString())
    while any(stream.qsize() for stream in streams):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    _say(end=time.monotonic())
    await server.wait_for_termination()


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def main() -> int:
    """One role."""
    roles: dict[str, Callable[[Load], Coroutine[Any, Any, None]]] = {
        "workers": workers,
        "clients": clients,
        "floor": floor,
    }
    role, argument = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(roles[role](Load(**json.loads(argument))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
