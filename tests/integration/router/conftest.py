"""A real router on loopback with fake workers, and what tests ask of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio
import pytest

from models.files.checkpoint import read_checkpoint
from router.app import Router
from router.retries import RetryPolicy
from shell.config import RouterConfig
from tandem.convert import info_to_proto
from tandem.errors import TandemError
from tandem.limits import Limits
from tandem.rpc.channel import open_channel
from tandem.rpc.received_error import error_from_rpc
from tandem.types import Role, WorkerId, WorkerInfo, new_incarnation
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc, registry_pb2, registry_pb2_grpc
from tests.recorded_events import RecordedRouter

PATIENCE_S = 20.0
POLL_S = 0.001


async def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Returns once the condition holds; yields to the loop until then."""
    async with asyncio.timeout(timeout_s):
        # A condition over plain state of both sides has no one event to wait on.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class Fakes:
    """What stands in for real workers and their model."""

    worker: Callable[..., Any]
    token_at: Callable[..., int]


class FakeCluster:
    """One router and its fake workers."""

    def __init__(self, router: Router, model: str, fakes: Fakes, recorded: RecordedRouter) -> None:
        self.router = router
        self.recorded = recorded
        self.workers: dict[str, Any] = {}
        self._fakes = fakes
        self.stop = asyncio.Event()
        self._model = model
        self._started: list[Any] = []

    async def start(self) -> None:
        """Serves until `stop` is set."""
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.serving = asyncio.create_task(self.router.serve(self._stopped, port.set_result))
        self.address = f"127.0.0.1:{await port}"
        self.channel: grpc.aio.Channel = open_channel(self.address)

    async def end(self) -> None:
        """Stops the router and every worker that was ever started here."""
        await self.channel.close()
        self.router._server._announce_s = 0.0  # nobody is left to be told that it drains
        self.stop.set()
        await asyncio.gather(*(worker.die() for worker in self._started))
        await self.serving

    async def _stopped(self) -> None:
        await self.stop.wait()

    @property
    def inference(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        """A client."""
        return inference_pb2_grpc.InferenceServiceStub(self.channel)  # type: ignore[return-value]

    async def add(self, role: Role, name: str, **info: Any) -> Any:
        """Starts a worker and returns once the router can use it."""
        worker = await self.add_unchecked(role, name, **info)
        await until(lambda: any(v.obstacle is None for v in self.router.workers.views() if v.info == worker.info))
        return worker

    async def add_unchecked(self, role: Role, name: str, **info: Any) -> Any:
        """Starts a worker, whether or not the router takes it."""
        worker = self._fakes.worker(self.worker_info(role, name, **info), self.workers)
        self.workers[name] = worker
        self._started.append(worker)
        await worker.start(self.address)
        return worker

    async def add_pair(self, suffix: str = "0") -> tuple[Any, Any]:
        """One prefill and one decode worker."""
        return await self.add(Role.PREFILL, f"p{suffix}"), await self.add(Role.DECODE, f"d{suffix}")

    def worker_info(self, role: Role, name: str, **changes: Any) -> WorkerInfo:
        """What such a worker announces."""
        checkpoint = read_checkpoint(self._model)
        info = WorkerInfo(
            worker_id=WorkerId(name),
            incarnation=new_incarnation(),
            role=role,
            address="",
            model=checkpoint.name,
            config_fingerprint=checkpoint.config_fingerprint,
            model_fingerprint="weights",
            layout_fingerprint="layout",
            transports=("shm", "tcp"),
            local_prefill_tokens=0,
            max_sequence_tokens=256,
            pid=1,
            device="fake",
        )
        return replace(info, **changes)

    def generate(
        self, *prompt: int, timeout_s: float | None = PATIENCE_S, **sampling: Any
    ) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]:
        """Starts a generation from token ids."""
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt), sampling=pb.SamplingParams(**({"max_tokens": 8} | sampling))
        )
        return self.inference.Generate(request, timeout=timeout_s)

    def register(
        self, info: WorkerInfo, metadata: grpc.aio.Metadata | None = None
    ) -> grpc.aio.StreamStreamCall[registry_pb2.RegisterRequest, registry_pb2.RegisterResponse]:
        """Begins a Register stream by hand."""
        first = registry_pb2.RegisterRequest(info=info_to_proto(info))

        async def requests() -> AsyncIterator[registry_pb2.RegisterRequest]:
            yield first
            await self.stop.wait()

        return registry_pb2_grpc.RegistryServiceStub(self.channel).Register(requests(), metadata=metadata)

    def completion(self, prompt: Iterable[int], length: int, index: int = 0) -> list[int]:
        """What the fake model says after `prompt` in one choice."""
        prompt = tuple(prompt)
        return [self._fakes.token_at(prompt, offset, index) for offset in range(length)]

    @staticmethod
    async def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Returns once the condition holds; fails after a while."""
        await until(condition, timeout_s)

    @staticmethod
    async def read_tokens(call: Any) -> list[int]:
        """All tokens of a generation; raises as the call does."""
        tokens: list[int] = []
        while isinstance(response := await call.read(), pb.GenerateResponse):
            tokens += response.token_ids
        return tokens

    @staticmethod
    async def error_of(call: Any) -> tuple[TandemError, grpc.StatusCode, list[int]]:
        """How a call failed: the error, its status, the tokens that came before."""
        tokens: list[int] = []
        try:
            while isinstance(response := await call.read(), pb.GenerateResponse):
                tokens += response.token_ids
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error), error.code(), tokens
        raise AssertionError(f"it succeeded with {tokens}")

    @property
    def idle(self) -> bool:
        """Whether no worker holds anything and no request is under way."""
        return all(worker.idle for worker in self.workers.values()) and self.router.queue.num_active == 0


Launch = Callable[..., Awaitable[FakeCluster]]


@pytest.fixture
def policy() -> type[RetryPolicy]:
    """How long requests wait for what."""
    return RetryPolicy


@pytest.fixture
def limits() -> type[Limits]:
    """Caps on requests."""
    return Limits


@pytest.fixture
async def launch(byte_checkpoint: Path, fake_worker: Any, token_at: Any) -> AsyncIterator[Launch]:
    """Starts routers; afterwards every worker must be idle, and all is stopped."""
    clusters: list[FakeCluster] = []

    async def start(*, policy: RetryPolicy | None = None, stall_s: float = 30.0, **options: Any) -> FakeCluster:
        config = RouterConfig(
            **{"model": str(byte_checkpoint), "listen": "127.0.0.1:0", "drain_grace_s": 0.0} | options
        )
        recorded = RecordedRouter()
        router = Router(config, policy=policy, stall_s=stall_s, rng=Random(1), listener=recorded.hear)
        cluster = FakeCluster(router, config.model, Fakes(fake_worker, token_at), recorded)
        await cluster.start()
        clusters.append(cluster)
        return cluster

    yield start
    try:
        for cluster in clusters:
            await until(lambda cluster=cluster: cluster.idle)
            cluster.recorded.check_all_ended()
    finally:
        await asyncio.gather(*(cluster.end() for cluster in clusters))


@pytest.fixture
async def cluster(launch: Launch) -> FakeCluster:
    """A router without workers, that waits for a pair only briefly."""
    return await launch(policy=RetryPolicy(patience_s=0.2))
