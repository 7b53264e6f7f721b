"""Real hand-offs into a decode worker: from a prefill worker over shm and tcp, and from a writer that is killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from bench.support.tiny_models import VOCAB_SIZE
from engine.loading import Engine
from kvtransfer.base import Fingerprints, PoolMemory
from kvtransfer.sender import KvSender
from prefill_worker.prompts import new_prefill_worker
from shell.clock import MonotonicClock
from tandem.errors import TransferError
from tandem.types import GroupSpec, Handle, TokenId, new_incarnation
from tests.faults.kv_peer import Forked, warm_up
from tests.integration.decode_worker.idle_writer import OPENED, idle_writer
from tests.worker_parts import parts_of
from worker.core import Worker

BLOCK_SIZE = 8
LENGTHS = (1, 7, 8, 9, 24, 25, 100)

MakeSpec = Callable[..., GroupSpec]
Reference = Callable[[GroupSpec], list[TokenId]]


@asynccontextmanager
async def open_prefill(engine: Engine, transport: str) -> AsyncIterator[Worker]:
    clock = MonotonicClock()
    memory = PoolMemory(
        engine.kv_cache.host_rows, engine.kv_cache.shared_fd, new_incarnation(), engine.kv_cache.staging
    )
    prints = Fingerprints(engine.model.fingerprint, engine.layout)
    sender = KvSender(memory, prints, clock, transport)
    max_tokens = engine.sizes.max_sequence_tokens
    sizes = {"max_seqs": 8, "chunk_tokens": 32, "max_tokens": max_tokens, "vocab_size": VOCAB_SIZE}
    parts = parts_of(engine.thread, engine.cache, **sizes)
    worker = new_prefill_worker(parts, sender)
    running = asyncio.create_task(worker.run())
    try:
        yield worker
        await asyncio.wait_for(worker.drained(), 20)
        worker.check_idle()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await sender.stop()


@pytest.mark.parametrize(
    ("transport", "staged_kv"),
    [("shm", False), ("tcp", False), ("shm", True), ("tcp", True)],
    ids=["shm", "tcp", "shm through rings", "tcp through rings"],
)
@pytest.mark.parametrize("num_blocks", [200, 44], ids=["roomy pool", "pool that preempts"])
async def test_handed_off_sequences_give_the_reference_tokens(
    open_bench: Any,
    load_tiny_engine: Callable[..., Engine],
    make_spec: MakeSpec,
    reference: Reference,
    transport: str,
    staged_kv: bool,
    num_blocks: int,
) -> None:
    specs = [make_spec(length, 80) for length in LENGTHS]
    prefill_engine = load_tiny_engine(BLOCK_SIZE, 64, staged_kv=staged_kv)
    async with (
        open_bench(BLOCK_SIZE, num_blocks, staged_kv=staged_kv) as bench,
        open_prefill(prefill_engine, transport) as prefill,
    ):
        assert await hand_off(bench, prefill, specs) == [[reference(spec)] for spec in specs]
        assert (bench.worker.load().preemptions > 0) == (num_blocks == 44)


@pytest.mark.parametrize("staged_kv", [False, True], ids=["", "through rings"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("block_size", [1, 16, 256])
async def test_of_a_next_turn_only_what_is_lacking_travels(
    open_bench: Any,
    load_tiny_engine: Callable[..., Engine],
    make_spec: MakeSpec,
    reference: Reference,
    transport: str,
    block_size: int,
    staged_kv: bool,
) -> None:
    spec, num_blocks = make_spec(37, 20), 1 + 128 // block_size
    prefill_engine = load_tiny_engine(block_size, num_blocks, staged_kv=staged_kv)
    async with (
        open_bench(block_size, num_blocks, staged_kv=staged_kv) as bench,
        open_prefill(prefill_engine, transport) as prefill,
    ):
        ((said,),) = await hand_off(bench, prefill, [spec])
        turn = replace(spec, prompt_token_ids=(*spec.prompt_token_ids, *said, *spec.prompt_token_ids[:9]))
        ((answer,),) = await hand_off(bench, prefill, [turn])
        assert answer == reference(turn)
        await bench.router.until(lambda: len(bench.router.handoffs) == 2)
        num_lacked = -(-66 // block_size) - 56 // block_size  # of the last token said, nothing was computed
        assert bench.router.handoffs[Handle(1)][0] == num_lacked * bench.engine.layout.block_bytes


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("num_blocks", [200, 48], ids=["roomy pool", "pool that preempts"])
async def test_handed_off_groups_give_the_tokens_of_single_requests(
    open_bench: Any,
    load_tiny_engine: Callable[..., Engine],
    make_spec: MakeSpec,
    transport: str,
    num_blocks: int,
) -> None:
    specs = [make_spec(length, 80, n=3, temperature=1.0, seed=length) for length in (7, 8, 9, 100)]
    prefill_engine = load_tiny_engine(BLOCK_SIZE, 64)
    singles = []
    async with open_bench(BLOCK_SIZE, num_blocks, max_seqs=9) as bench:
        for spec in specs:
            alone = [
                make_spec(spec.num_prompt_tokens, 80, temperature=1.0, seed=spec.sampling.seed + i) for i in range(3)
            ]
            singles.append([tokens for each in alone for (tokens,) in await bench.complete([each])])
        assert bench.worker.load().preemptions == 0
    async with (
        open_bench(BLOCK_SIZE, num_blocks, max_seqs=9) as bench,
        open_prefill(prefill_engine, transport) as prefill,
    ):
        assert await hand_off(bench, prefill, specs) == singles
        assert (bench.worker.load().preemptions > 0) == (num_blocks == 48)


async def hand_off(bench: Any, prefill: Worker, specs: list[GroupSpec]) -> list[list[list[TokenId]]]:
    """Plays the router; returns the choices of each."""
    router, reserved, granted = bench.router, set[Handle](), set[Handle]()
    handles = {bench.new_handle(spec): spec for spec in specs}
    for handle, spec in handles.items():
        prefill.prefill(router, handle, spec, "decode-1")
    while len(granted) < len(specs):
        await router.until(
            lambda: (
                router.errors
                or {*router.started} & handles.keys() - reserved
                or router.grants.keys() & reserved - granted
            )
        )
        assert not router.errors
        for handle in {*router.started} & handles.keys() - reserved:
            bench.worker.reserve(router, handle, handles[handle], local_prefill=False)
            reserved.add(handle)
        for handle in router.grants.keys() & reserved - granted:
            prefill.grant(router, handle, *router.grants[handle])
            granted.add(handle)
    await bench.finish(handles)
    return [router.completions(handle) for handle in handles]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_killed_writer_fails_its_sequence_and_its_blocks_come_back(
    open_bench: Any, make_spec: MakeSpec, reference: Reference, transport: str
) -> None:
    async with open_bench(BLOCK_SIZE, 64) as bench:
        unlucky, spec = make_spec(30, 8, n=2), make_spec(9, 8)
        async with opened_by_child(bench, unlucky, transport) as (child, handle):
            assert bench.worker.load().pool.receiving == 4
            child.signal(signal.SIGKILL)
            await bench.router.until(lambda: bench.router.errors)
        assert isinstance(bench.router.errors.pop(handle), TransferError)
        await everything_free(bench, make_spec)
        assert await bench.complete([spec]) == [[reference(spec)]]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_released_under_a_live_writer_its_blocks_wait_until_it_is_dead(
    open_bench: Any, make_spec: MakeSpec, transport: str
) -> None:
    async with open_bench(BLOCK_SIZE, 64) as bench:
        async with opened_by_child(bench, make_spec(30, 8), transport) as (child, handle):
            bench.worker.release(bench.router, handle)
            pool = bench.worker.load().pool
            assert pool.quarantined + pool.free == pool.total
            child.signal(signal.SIGKILL)
        await everything_free(bench, make_spec)
        assert not bench.router.errors


@asynccontextmanager
async def opened_by_child(bench: Any, spec: GroupSpec, transport: str) -> AsyncIterator[tuple[Forked, Handle]]:
    """Reserves, and lets a child process show the ticket and write one block."""
    warm_up()
    handle = bench.reserve(spec, local_prefill=False)
    await bench.router.until(lambda: handle in bench.router.grants)
    ticket, endpoint = bench.router.grants[handle]
    child = idle_writer(transport, ticket, endpoint, Fingerprints(bench.engine.model.fingerprint, bench.engine.layout))
    try:
        assert await child.hear() == OPENED
        yield child, handle
    finally:
        child.close()


async def everything_free(bench: Any, make_spec: MakeSpec) -> None:
    """Waits for every block: a sequence that needs them all is let in only then."""
    whole_pool = bench.reserve(make_spec(64 * BLOCK_SIZE - 1, 1), local_prefill=False)
    await bench.router.until(lambda: whole_pool in bench.router.grants)
    bench.worker.release(bench.router, whole_pool)
