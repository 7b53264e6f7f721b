"""KV events over loopback, read by decoders that are written from vLLM's schema."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from shell.config import WorkerConfig
from tandem.errors import ConfigError
from tandem.types import TokenId
from worker.serving import kv_events
from worker.serving.kv_events import KvEvents

LOOPBACK = "tcp://127.0.0.1:*"
NOW_S = 1789095808.5
TIMEOUT_S = 10
TOKENS = tuple(map(TokenId, range(8)))

_FIELDS = {
    "BlockStored": {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"},
    "BlockRemoved": {"block_hashes", "medium"},
    "AllBlocksCleared": set(),
}
"""Which every event has; `extra_keys` may come with a BlockStored."""


@dataclass
class Batch:
    """As read by a subscriber."""

    number: int
    unix_time: float
    events: list[dict[str, Any]]
    rank: int | None


def decoded(number: bytes, payload: bytes) -> Batch:
    """Raises where the payload is not of the schema."""
    assert len(number) == 8
    unix_time, events, *rest = msgpack.unpackb(payload)
    return Batch(int.from_bytes(number, "big"), unix_time, [_event(each) for each in events], *rest or [None])


def _event(raw: dict[str, Any]) -> dict[str, Any]:
    tag = raw["type"]
    optional = {"extra_keys"} if tag == "BlockStored" else set()
    assert _FIELDS[tag] <= raw.keys() - {"type"} <= _FIELDS[tag] | optional
    return raw


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    """Of subscribers."""
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


@asynccontextmanager
async def publishing(
    context: zmq.asyncio.Context,
    *,
    topic: str = "",
    subscribe: str = "",
    address: str = LOOPBACK,
) -> AsyncIterator[tuple[KvEvents, zmq.asyncio.Socket]]:
    """A worker's events, and a subscriber that is known to hear them from the next one on."""
    config = WorkerConfig(
        kv_events=(address, LOOPBACK),
        kv_events_topic=topic,
        block_size=4,
    )
    with KvEvents(config, lambda: NOW_S) as events, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(subscribe)
        subscriber.connect(events.addresses[0])
        async with asyncio.timeout(TIMEOUT_S):
            while not await subscriber.poll(10):  # a PUB socket does not say who has subscribed
                events.cleared()
        events.removed([0])  # behind all that was told until it was heard
        while (await read(subscriber))[1].events[-1]["type"] != "BlockRemoved":
            pass
        yield events, subscriber


async def read(subscriber: zmq.asyncio.Socket) -> tuple[str, Batch]:
    topic, number, payload = await asyncio.wait_for(subscriber.recv_multipart(), TIMEOUT_S)
    return topic.decode(), decoded(number, payload)


async def replay(context: zmq.asyncio.Context, events: KvEvents, first: int) -> list[Batch]:
    """As a subscriber asks for it: with the empty frame that a REQ socket would put before."""
    batches = []
    with context.socket(zmq.DEALER) as asker:
        asker.connect(events.addresses[1])
        await asker.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            empty, number, payload = await asyncio.wait_for(asker.recv_multipart(), TIMEOUT_S)
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return batches
            batches.append(decoded(number, payload))


async def test_a_subscriber_hears_what_the_cache_stores_and_removes(context: zmq.asyncio.Context) -> None:
    topic = "kv@10.0.0.1@demo"
    async with publishing(context, topic=topic, subscribe="kv@") as (events, subscriber):
        events.stored("", None, [2**64 - 1, 7], TOKENS)
        events.removed([7])
        await asyncio.sleep(0)
        events.stored("", 2**64 - 1, [9], TOKENS[4:])
        events.cleared()
        told, first = await read(subscriber)
        _, second = await read(subscriber)
    assert told == topic
    assert first.unix_time == NOW_S
    assert first.rank == 0
    assert second.number == first.number + 1
    stored, removed = first.events
    assert stored == {
        "type": "BlockStored",
        "block_hashes": [2**64 - 1, 7],
        "parent_block_hash": None,
        "token_ids": list(range(8)),
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    assert removed == {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}
    assert second.events[0]["parent_block_hash"] == 2**64 - 1
    assert second.events[1] == {"type": "AllBlocksCleared"}


async def test_events_are_maps_on_the_wire(context: zmq.asyncio.Context) -> None:
    async with publishing(context) as (events, subscriber):
        events.removed([1])
        _, _, payload = await asyncio.wait_for(subscriber.recv_multipart(), TIMEOUT_S)
        assert isinstance(msgpack.unpackb(payload)[1][0], dict)


async def test_a_salt_is_the_extra_key_of_the_first_block(context: zmq.asyncio.Context) -> None:
    async with publishing(context) as (events, subscriber):
        events.stored("salt", None, [1, 2], TOKENS)
        events.stored("salt", 2, [3], TOKENS[4:])
        _, batch = await read(subscriber)
    assert batch.events[0]["extra_keys"] == [["salt"], None]
    assert "extra_keys" not in batch.events[1]


async def test_what_was_missed_can_be_replayed(context: zmq.asyncio.Context) -> None:
    async with publishing(context) as (events, subscriber):
        numbers = []
        for name in range(5):
            events.removed([name])
            numbers.append((await read(subscriber))[1].number)
        again = await replay(context, events, numbers[2])
        assert [each.number for each in again] == numbers[2:]
        assert [each.events[0]["block_hashes"] for each in again] == [[2], [3], [4]]
        assert await replay(context, events, numbers[-1] + 1) == []


async def test_a_replay_is_of_the_latest_batches_only(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_KEPT", 3)
    async with publishing(context) as (events, subscriber):
        for name in range(5):
            events.removed([name])
            _, last = await read(subscriber)
        assert [each.number for each in await replay(context, events, 0)] == [last.number - 2 + n for n in range(3)]
        monkeypatch.setattr(kv_events, "MAX_KEPT_BYTES", 100)
        events.stored("", None, [1], TOKENS * 100)
        await read(subscriber)
        assert await replay(context, events, 0) == []


async def test_nonsense_from_a_subscriber_is_no_ones_trouble(context: zmq.asyncio.Context) -> None:
    async with publishing(context) as (events, subscriber), AsyncExitStack() as stack:
        asker = stack.enter_context(context.socket(zmq.DEALER))
        asker.linger = 0  # what nobody has read when the test ends may be lost
        asker.connect(events.addresses[1])
        for nonsense in ([b""], [b"", b"too short"], [b"x" * 2000], [b""] * 20):
            await asker.send_multipart(nonsense)
        events.removed([1])
        assert (await read(subscriber))[1].events[0]["block_hashes"] == [1]
        assert await replay(context, events, 2**64 - 1) == []


async def test_a_subscriber_that_does_not_read_loses_batches_and_keeps_nobody_waiting(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kv_events, "MAX_UNREAD", 20)
    # Of a local socket, the system buffers little.
    async with (
        publishing(context, address=f"ipc://{tmp_path}/events") as (events, subscriber),
        AsyncExitStack() as stack,
    ):
        sleeper = stack.enter_context(context.socket(zmq.SUB))
        sleeper.set_hwm(1)
        sleeper.subscribe("")
        sleeper.connect(events.addresses[0])
        async with asyncio.timeout(TIMEOUT_S):
            while not await sleeper.poll(10):
                events.cleared()
                await read(subscriber)
        num_batches, numbers = 100, []
        for _ in range(num_batches):
            events.stored("", None, [1], TOKENS * 2000)
            _, number, _ = await asyncio.wait_for(subscriber.recv_multipart(), TIMEOUT_S)
            numbers.append(int.from_bytes(number, "big"))
        assert numbers == list(range(numbers[0], numbers[0] + num_batches)), "who reads gets all"
        left = []
        while await sleeper.poll(50):
            _, number, _ = await sleeper.recv_multipart()
            left.append(int.from_bytes(number, "big"))
        assert set(numbers) - set(left), "not all was kept for the other one"


async def test_batches_that_find_no_room_leave_a_gap_in_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_QUEUED", 2)
    events = KvEvents(WorkerConfig(kv_events=(LOOPBACK,)))
    for _ in range(5):  # its thread does not run yet
        events.removed([1])
        await asyncio.sleep(0)
    assert [batch[0] for batch in events._queue if batch is not None] == [3, 4]
    with events:
        pass


def test_an_address_that_cannot_be_had_is_named() -> None:
    with KvEvents(WorkerConfig(kv_events=(LOOPBACK,))) as events:
        (taken,) = events.addresses
        with pytest.raises(ConfigError, match="--kv-events: Address already in use"):
            KvEvents(WorkerConfig(kv_events=(taken,))).__enter__()
        with pytest.raises(ConfigError, match="--kv-events: Address already in use"):
            KvEvents(WorkerConfig(kv_events=(LOOPBACK, taken))).__enter__()
    with pytest.raises(ConfigError, match="--kv-events: takes one address for events and one for replays"):
        KvEvents(WorkerConfig(kv_events=(LOOPBACK, LOOPBACK, LOOPBACK))).__enter__()


async def test_what_was_told_last_is_published_and_nothing_is_written_after_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published: list[list[Any]] = []
    monkeypatch.setattr(KvEvents, "_publish", lambda _, batch: published.append(batch[2]))
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
    with KvEvents(WorkerConfig(kv_events=(LOOPBACK,))) as events:
        events.cleared()
    await asyncio.sleep(0)
    assert published == [[{"type": "AllBlocksCleared"}]]
    assert not errors
