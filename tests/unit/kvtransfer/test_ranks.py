"""Hand-offs between workers of any two sizes: two processes with pools alone, each pool in as many parts as ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from itertools import product
from multiprocessing.connection import Connection as Pipe
from typing import Any

import pytest
import torch

from kvtransfer.base import Fingerprints
from kvtransfer.grain_rows import GrainRows
from kvtransfer.pool import Pool
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.transport import SendingLane
from kvtransfer.transports import TRANSPORTS as TRANSPORTS_KNOWN
from kvtransfer.transports import choose
from shell.clock import MonotonicClock
from tandem.errors import ChecksumMismatch, ConfigError, TransferError
from tandem.kv_layout import DType, KvLayout, QuantDType
from tests.faults.kv_peer import Forked, heard
from tests.kv_ends import FAILED, PATIENT, Pair, Recorder, ends, push_and_commit, refs_of
from tests.nixl_param import needs_nixl
from tests.parted_pool import NUM_BLOCKS, PartedPool, blocks_of
from tests.transports import StagedPool

SIZES = (1, 2, 4, 8)
HEADS = (1, 2, 8)
TRANSPORTS = ("shm", "tcp")
SOURCES, TARGETS = [7, 1, 2, 3, 9], [4, 5, 11, 0, 1]
"""Neighbours among them on either side."""


def layout_of(num_heads: int, dtype: DType | QuantDType = DType.BFLOAT16) -> KvLayout:
    return KvLayout(num_layers=2, num_kv_heads=num_heads, block_size=4, head_dim=16, dtype=dtype)


LAYOUTS = [layout_of(num_heads, dtype) for num_heads in HEADS for dtype in (DType.BFLOAT16, QuantDType.INT8)]


async def _receive(pipe: Pipe) -> None:
    """Hears a layout, a size and a transport; says its offer, then whether all parts hold the blocks of that seed."""
    while words := await heard(pipe):
        layout, num_ranks, transport, seed = words
        with closing(PartedPool(layout, num_ranks)) as pool:
            prints = Fingerprints("model-a", layout)
            receiver = KvReceiver(pool.memory, prints, MonotonicClock(), (transport,), "127.0.0.1", timing=PATIENT)
            await receiver.start()
            listener = Recorder()
            offer = receiver.offer(refs_of(TARGETS), listener, 60.0)
            pipe.send((offer.ticket, offer.endpoint))
            await listener.until("committed")
            pipe.send(pool.holds(blocks_of(layout, seed)[SOURCES], TARGETS))
            await receiver.stop()


def _run(pipe: Pipe) -> None:
    asyncio.run(_receive(pipe))


@pytest.fixture
def receiving() -> Iterator[Forked]:
    with closing(Forked(_run)) as process:
        yield process


async def hand_over(receiving: Forked, layout: KvLayout, sizes: tuple[int, int], transport: str, seed: int) -> Any:
    with closing(PartedPool(layout, sizes[0])) as pool:
        pool.fill(blocks_of(layout, seed))
        receiving.tell(layout, sizes[1], transport, seed)
        sender = KvSender(pool.memory, Fingerprints("model-a", layout), MonotonicClock(), transport, timing=PATIENT)
        try:
            report = await push_and_commit(await sender.open(*await receiving.hear(), 60.0), SOURCES)
        finally:
            await sender.stop()
        assert await receiving.hear(), f"{layout} over {transport}, sizes {sizes}"
    return report


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.num_kv_heads}-{layout.dtype}")
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_pair_of_sizes_hands_over_every_byte_between_processes(
    receiving: Forked, layout: KvLayout, transport: str
) -> None:
    for seed, sizes in enumerate(product(SIZES, SIZES)):
        report = await hand_over(receiving, layout, sizes, transport, seed)
        assert report.num_bytes == len(SOURCES) * layout.block_bytes, "what ranks share travels once"


@needs_nixl
@pytest.mark.parametrize(("num_heads", "sizes"), [(2, (1, 4)), (2, (8, 2)), (8, (2, 8)), (8, (8, 2)), (8, (4, 4))])
async def test_nixl_writes_each_span_where_it_belongs(
    receiving: Forked, num_heads: int, sizes: tuple[int, int]
) -> None:
    report = await hand_over(receiving, layout_of(num_heads), sizes, "nixl", seed=5)
    parts = max(sizes) if num_heads == 8 else max(sizes[1], 2)
    assert report.num_spans == parts * len(SOURCES)


@asynccontextmanager
async def paired(layout: KvLayout, sizes: tuple[int, int], transport: str) -> AsyncIterator[Pair]:
    pools: list[Any] = [PartedPool(layout, num_ranks) for num_ranks in sizes]
    pools[0].fill(blocks_of(layout, 1))
    async with ends(*pools, transport, (transport,), prints=Fingerprints("model-a", layout)) as pair:
        yield pair


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("rank", range(4))
async def test_a_corrupted_part_is_found_and_names_its_rank(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, transport: str, rank: int
) -> None:
    announced = GrainRows.checksums if transport == "tcp" else GrainRows.copy_to
    layout = layout_of(8)

    async with paired(layout, (2, 4), transport) as pair:
        source, target = pair.source, pair.target

        def spoiling(self: GrainRows, *args: Any) -> tuple[int, ...]:
            """A byte changes behind the checksums: in the target, or on the way out of the source."""
            found: tuple[int, ...] = announced(self, *args)
            if transport == "shm":
                target.parts[rank][TARGETS[1], 3] ^= 1  # type: ignore[attr-defined]
            else:
                half = layout.part(4).block_bytes
                source.parts[rank // 2][SOURCES[1], rank % 2 * half + 3] ^= 1  # type: ignore[attr-defined]
            return found

        monkeypatch.setattr(GrainRows, announced.__name__, spoiling)
        with pytest.raises(ChecksumMismatch, match=f"block of rank {rank} at position 1 "):
            await push_and_commit(await pair.begin(recorder, TARGETS), SOURCES)
        await recorder.until("writer_stopped")
        assert recorder.calls == FAILED


async def test_a_corrupted_copy_of_a_shared_head_is_found_too(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_to = GrainRows.copy_to
    async with paired(layout_of(2), (2, 8), "shm") as pair:

        def spoiling(self: GrainRows, *args: Any) -> tuple[int, ...]:
            found = copy_to(self, *args)
            pair.target.parts[6][TARGETS[0], 3] ^= 1  # type: ignore[attr-defined]
            return found

        monkeypatch.setattr(GrainRows, "copy_to", spoiling)
        with pytest.raises(ChecksumMismatch, match="block of rank 6 at position 0 "):
            await push_and_commit(await pair.begin(recorder, TARGETS), SOURCES)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (8, 8), (1, 8), (8, 1)])
async def test_small_fragments_leave_in_one_piece_over_tcp(recorder: Recorder, sizes: tuple[int, int]) -> None:
    async with paired(layout_of(8), sizes, "tcp") as pair:
        report = await push_and_commit(await pair.begin(recorder, TARGETS), SOURCES)
        assert report.num_spans == 1


@pytest.mark.parametrize(("sizes", "num_spans"), [((1, 1), 1), ((2, 2), 2), ((1, 8), 8), ((8, 1), 8), ((2, 8), 8)])
async def test_over_shm_a_block_is_one_copy_for_each_part_of_the_finer_side(
    recorder: Recorder, sizes: tuple[int, int], num_spans: int
) -> None:
    async with paired(layout_of(8), sizes, "shm") as pair:
        report = await push_and_commit(await pair.begin(recorder, TARGETS), SOURCES)
        assert report.num_spans == num_spans * len(SOURCES)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_sizes_of_which_neither_divides_the_other_cut_finer_than_both(recorder: Recorder, transport: str) -> None:
    layout = layout_of(6)
    async with paired(layout, (2, 3), transport) as pair:
        await push_and_commit(await pair.begin(recorder, TARGETS), SOURCES)
        assert pair.target.holds(blocks_of(layout, 1)[SOURCES], TARGETS)  # type: ignore[attr-defined]


async def test_blocks_of_a_device_reach_parts_over_tcp_and_shm_says_so(recorder: Recorder) -> None:
    layout = layout_of(8)
    source, target = StagedPool(NUM_BLOCKS, layout.block_bytes), PartedPool(layout, 4)
    prints = Fingerprints("model-a", layout)
    async with ends(source, target, "auto", TRANSPORTS, prints=prints) as pair:  # type: ignore[arg-type]
        report = await push_and_commit(await pair.begin(recorder, TARGETS), SOURCES)
        assert report.transport == "tcp"
        assert (
            "shm: shm copies blocks of a device whole, and ranks divide the peer's pool; use tcp" in report.passed_over
        )
        assert target.holds(source.blocks[SOURCES], TARGETS)


async def test_parts_reach_the_ring_of_a_device(recorder: Recorder) -> None:
    layout = layout_of(8)
    for transport in TRANSPORTS:
        source, target = PartedPool(layout, 4), StagedPool(NUM_BLOCKS, layout.block_bytes)
        source.fill(blocks_of(layout, 3))
        prints, listener = Fingerprints("model-a", layout), Recorder()
        async with ends(source, target, transport, (transport,), prints=prints) as pair:  # type: ignore[arg-type]
            await push_and_commit(await pair.begin(listener, TARGETS), SOURCES)
            assert torch.equal(target.blocks[TARGETS], blocks_of(layout, 3)[SOURCES])


@pytest.mark.parametrize("num_ranks", [5, 64])
async def test_a_peer_whose_ranks_do_not_fit_the_heads_is_refused_in_the_handshake(num_ranks: int) -> None:
    with closing(PartedPool(layout_of(6), 2)) as pool:
        local = Pool(pool.memory, Fingerprints("model-a", layout_of(6)))
        lane = SendingLane(local)
        lane.name = "tcp"
        with pytest.raises(TransferError, match=f"no way from 2 ranks to {num_ranks}: .*cannot share 6 K/V heads"):
            lane.attach(replace(lane.hello(), num_ranks=num_ranks), "xxh3-64")
        with pytest.raises(TransferError, match="tcp does not reach pools that ranks divide; shm and tcp do"):
            lane.attach(lane.hello(), "xxh3-64")
        lane.close()
        local.close()


@pytest.mark.parametrize("transport", [each.name for each in TRANSPORTS_KNOWN if not each.splits])
def test_a_transport_that_does_not_reach_parts_is_refused_by_name(transport: str) -> None:
    with pytest.raises(ConfigError, match=f"{transport} does not work .*say one that works here: shm, "):
        choose(transport, "cpu", num_ranks=2)
    assert set(TRANSPORTS) <= set(choose("auto", "cpu", num_ranks=2)[0])
