"""`python -m decode_worker` as its own process, driven over gRPC as a router would."""

from __future__ import annotations

import asyncio
import math
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from safetensors.torch import load_file, save_file

from engine.engine_thread import MAX_FAILURES
from tandem.convert import deltas_from_proto, group_to_proto
from tandem.types import GroupSpec, TokenId
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tests.fake_registry import becomes_ready, listening
from tests.worker_process import DEADLINE_S, address_of, worker_process

MakeSpec = Callable[..., GroupSpec]
Reference = Callable[[GroupSpec], list[TokenId]]


def process(model: Path, *options: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    return worker_process("decode_worker", model, "--dtype", "float32", *options)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Any]:
    """A router's stream, hellos exchanged."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Connect()
        await call.write(worker_pb2.ConnectRequest(hello=worker_pb2.RouterHello(router_incarnation="0" * 32)))
        assert (await call.read()).hello.incarnation
        yield call
        call.cancel()


def reserve(handle: int, spec: GroupSpec) -> worker_pb2.ConnectRequest:
    message = worker_pb2.Reserve(handle=handle, group=group_to_proto(spec), local_prefill=True)
    return worker_pb2.ConnectRequest(reserve=message)


async def completion(call: Any) -> list[int]:
    """Reads one sequence to its end."""
    tokens: list[int] = []
    async with asyncio.timeout(DEADLINE_S):
        while True:
            answer = await call.read()
            assert not answer.HasField("failed"), answer.failed.message
            for _, delta in deltas_from_proto(answer.step_outputs):
                assert delta.offset == len(tokens)
                tokens.extend(delta.token_ids)
                if delta.finish_reason:
                    return tokens


async def test_it_serves_and_leaves_with_code_0_on_sigterm(
    tiny_llama: Path, make_spec: MakeSpec, reference: Reference
) -> None:
    spec = make_spec(40, 12)
    async with listening() as router, process(tiny_llama, "--router", router) as child:
        address = await address_of(child)
        await becomes_ready(address, DEADLINE_S)
        async with connected(address) as call:
            await call.write(reserve(1, spec))
            assert await completion(call) == reference(spec)
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            assert await child.wait() == 0


async def test_sigterm_lets_a_running_sequence_finish(
    tiny_llama: Path, make_spec: MakeSpec, reference: Reference
) -> None:
    spec = make_spec(40, 400)
    async with process(tiny_llama) as child, connected(await address_of(child)) as call:
        await call.write(reserve(1, spec))
        async with asyncio.timeout(DEADLINE_S):
            while not (await call.read()).HasField("reserved"):
                pass  # what its cache holds comes first
        child.send_signal(signal.SIGTERM)
        assert await completion(call) == reference(spec)
        async with asyncio.timeout(DEADLINE_S):
            assert await child.wait() == 0


async def test_a_worker_whose_every_step_is_broken_ends_with_code_1(
    tiny_llama: Path, make_spec: MakeSpec, tmp_path: Path
) -> None:
    broken = shutil.copytree(tiny_llama, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    async with process(broken) as child, connected(await address_of(child)) as call:
        async with asyncio.timeout(DEADLINE_S):
            for handle in range(1, MAX_FAILURES):
                await call.write(reserve(handle, make_spec(9, 4)))
                while not (answer := await call.read()).HasField("failed"):
                    pass
                assert (answer.failed.reason, answer.failed.retryable) == ("INTERNAL", True)
            assert child.returncode is None
            await call.write(reserve(MAX_FAILURES, make_spec(9, 4)))
            _, errors = await child.communicate()
        assert child.returncode == 1
        assert f"{MAX_FAILURES} steps in a row failed" in errors.decode()
