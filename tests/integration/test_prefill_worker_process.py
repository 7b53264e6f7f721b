"""`python -m prefill_worker` as its own process, driven over gRPC as a router would."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from bench.support.tiny_models import TINY_MODELS, save_tiny_model
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tests.fake_registry import becomes_ready, listening
from tests.worker_process import DEADLINE_S, address_of, worker_process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(TINY_MODELS[0], tmp_path_factory.mktemp("model"))


def process(model: Path, *options: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    return worker_process("prefill_worker", model, *options)


def prefill_message(handle: int, num_tokens: int = 20, max_tokens: int = 4) -> worker_pb2.ConnectRequest:
    group = worker_pb2.Group(
        request_id="r",
        prompt_token_ids=[1 + index for index in range(num_tokens)],
        choices=[worker_pb2.GroupChoice()],
        sampling=worker_pb2.ResolvedSampling(max_tokens=max_tokens, top_p=1.0, repetition_penalty=1.0),
    )
    return worker_pb2.ConnectRequest(prefill=worker_pb2.Prefill(handle=handle, group=group))


def grant_message(handle: int) -> worker_pb2.ConnectRequest:
    grant = worker_pb2.Grant(handle=handle, ticket=b"not a ticket", kv_endpoint=b"nowhere")
    return worker_pb2.ConnectRequest(grant=grant)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Callable[..., Awaitable[worker_pb2.ConnectResponse]]]:
    """A router's stream; gives what sends a message, if it is given one, and reads the next answer."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Connect()
        await call.write(worker_pb2.ConnectRequest(hello=worker_pb2.RouterHello(router_incarnation="0" * 32)))
        assert (await call.read()).hello.incarnation

        async def ask(message: worker_pb2.ConnectRequest | None = None) -> worker_pb2.ConnectResponse:
            if message is not None:
                await call.write(message)
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    response = await call.read()
                    if response.WhichOneof("message") != "cache_changes":
                        return response

        yield ask
        call.cancel()


async def test_it_serves_answers_and_leaves_with_code_0_on_sigterm(model: Path) -> None:
    async with listening() as router, process(model, "--router", router) as child:
        address = await address_of(child)
        await becomes_ready(address, DEADLINE_S)
        async with connected(address) as ask:
            refused = await ask(prefill_message(1, max_tokens=100_000))
            assert (refused.failed.handle, refused.failed.field) == (1, "sampling.max_tokens")
            assert (await ask(prefill_message(2))).prefill_started.handle == 2
            failed = await ask(grant_message(2))
            while failed.WhichOneof("message") != "failed":
                failed = await ask()
            assert failed.failed.handle == 2
            assert failed.failed.retryable
            once = await ask(prefill_message(3, max_tokens=1))
            assert once.prefill_started.handle == 3
            assert (await ask()).prefill_done.handle == 3
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            assert await child.wait() == 0
