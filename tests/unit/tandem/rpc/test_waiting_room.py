from __future__ import annotations

import asyncio

import pytest

from tandem.errors import DeadlineExceeded
from tandem.rpc.waiting_room import WaitingRoom

FOR_EVER_S = 3600.0
TIMEOUT_S = 30


async def stay(room: WaitingRoom, seated: asyncio.Event) -> None:
    async with room.seat():
        seated.set()
        await asyncio.Event().wait()


async def test_who_stays_too_long_is_turned_out() -> None:
    room = WaitingRoom(1, longest_s=0.01)

    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(DeadlineExceeded):
            await stay(room, asyncio.Event())


async def test_a_newcomer_gets_the_seat_of_who_has_sat_longest() -> None:
    room = WaitingRoom(2, FOR_EVER_S)
    staying = []
    async with asyncio.timeout(TIMEOUT_S):
        for _ in range(4):
            seated = asyncio.Event()
            staying.append(asyncio.create_task(stay(room, seated)))
            await seated.wait()

        for turned_out in staying[:2]:
            with pytest.raises(DeadlineExceeded):
                await turned_out
    assert not any(task.done() for task in staying[2:])
    for task in staying[2:]:
        task.cancel()


async def test_who_leaves_makes_room() -> None:
    room = WaitingRoom(1, FOR_EVER_S)
    for _ in range(3):
        async with room.seat():
            await asyncio.sleep(0)
    with pytest.raises(ValueError, match="its own"):
        async with room.seat():
            raise ValueError("its own")
    async with room.seat():
        pass
