"""Prompts of a worker of some ranks, decoded by a worker of any other number: the tokens of transformers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import pytest

from bench.support.reference import Reference
from bench.support.tiny_models import TINY_MODELS, VOCAB_SIZE, save_tiny_model
from decode_worker.worker import new_decode_worker
from engine.guides import Guides
from engine.loading import EngineRole
from kvtransfer.receiver import KvReceiver
from prefill_worker.prompts import new_prefill_worker
from shell.config import DecodeConfig, PrefillConfig, WorkerConfig
from shell.rpc.process import StopSignal
from tandem.types import ChoiceSpec, GroupSpec, Handle, RequestId, Role, SamplingParams, TokenId
from tests.heard_router import HeardRouter
from worker.core import Worker
from worker.serving.app import Foundation

SIZES = (1, 2, 4)
"""Of the model's two K/V heads each of four ranks holds a copy of one."""
TRANSPORTS = ("shm", "tcp")
MAX_TOKENS = 12

pytestmark = pytest.mark.native


@dataclass
class Side:
    """A running worker and what it says."""

    worker: Worker
    router: HeardRouter = field(default_factory=HeardRouter)


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[Side]:
    task = asyncio.create_task(worker.run())
    try:
        yield Side(worker)
        await worker.drained()
        worker.check_idle()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def prefill_of(config: WorkerConfig) -> AsyncIterator[Side]:
    base = Foundation.lay(Role.PREFILL, config, None)
    async with AsyncExitStack() as undo:
        engine = await undo.enter_async_context(base.engine(EngineRole(prefills_only=True), StopSignal()))
        sender, guides = base.sender(engine), Guides(None)
        undo.push_async_callback(sender.stop)
        yield await undo.enter_async_context(running(new_prefill_worker(base.parts(engine, guides), sender)))


@asynccontextmanager
async def decode_of(config: DecodeConfig) -> AsyncIterator[dict[str, Side]]:
    """One worker at a time by transport, all on the same engine."""
    base = Foundation.lay(Role.DECODE, config, None)
    async with AsyncExitStack() as undo:
        engine = await undo.enter_async_context(base.engine(EngineRole(shared_kv=True), StopSignal()))
        sides = {}
        for transport in TRANSPORTS:
            memory, prints = base.pool_memory(engine), base.fingerprints(engine)
            receiver = KvReceiver(memory, prints, base.clock, (transport,), "127.0.0.1")
            await receiver.start()
            undo.push_async_callback(receiver.stop)
            worker = new_decode_worker(base.parts(engine, Guides(None)), receiver, config)
            sides[transport] = await undo.enter_async_context(running(worker))
        yield sides


def specs_of(lengths: Sequence[int]) -> list[GroupSpec]:
    rng = random.Random(5)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    return [
        GroupSpec(
            RequestId(f"r{length}"),
            tuple(TokenId(rng.randrange(VOCAB_SIZE)) for _ in range(length)),
            sampling,
            (ChoiceSpec(0),),
        )
        for length in lengths
    ]


async def answers(prefill: Side, decode: Side, specs: Sequence[GroupSpec], first: int) -> list[list[TokenId]]:
    """The tokens of each, handed over; handles from `first` on."""
    handles = [Handle(first + number) for number in range(len(specs))]
    for handle, spec in zip(handles, specs, strict=True):
        decode.router.num_choices[handle] = 1
        prefill.worker.prefill(prefill.router, handle, spec, "decode-1")
        decode.worker.reserve(decode.router, handle, spec, local_prefill=False)
    for handle in handles:
        await decode.router.until(lambda handle=handle: handle in decode.router.grants)
        prefill.worker.grant(prefill.router, handle, *decode.router.grants[handle])
    await decode.router.until(lambda: decode.router.errors or set(handles) <= decode.router.ended)
    assert prefill.router.errors == decode.router.errors == {}
    return [prefill.router.tokens[handle] + decode.router.tokens[handle] for handle in handles]


@pytest.mark.timeout(300)
async def test_every_pair_of_sizes_gives_the_tokens_of_transformers_over_every_transport(tmp_path: Path) -> None:
    folder = save_tiny_model(TINY_MODELS[0], tmp_path)
    specs = specs_of((1, 15, 16, 33, 90))
    reference = Reference(folder)
    expected = [reference.generate(spec.prompt_token_ids, MAX_TOKENS) for spec in specs]
    common = {"model": str(folder), "device": "cpu", "dtype": "float32", "kv_blocks": 64, "threads": 4}
    async with AsyncExitStack() as undo:
        prefills, decodes = {}, {}
        for size in SIZES:
            config = replace(PrefillConfig(), tensor_parallel=size, prefix_cache=False, **common)
            prefills[size] = await undo.enter_async_context(prefill_of(config))
            config = replace(DecodeConfig(), tensor_parallel=size, prefix_cache=False, **common)
            decodes[size] = await undo.enter_async_context(decode_of(config))
        for number, (source, target, transport) in enumerate(product(SIZES, SIZES, TRANSPORTS)):
            found = await answers(prefills[source], decodes[target][transport], specs, 100 * number)
            assert found == expected, f"{source} to {target} ranks over {transport}"
