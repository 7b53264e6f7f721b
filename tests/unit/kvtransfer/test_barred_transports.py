"""A transport over which checksums fail again and again is given up towards that peer."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.link import CORRUPT_IN_A_ROW
from kvtransfer.pool import Pool
from kvtransfer.transport import Fields, SendingLane
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.tcp import TcpTransport
from tandem.errors import ChecksumMismatch
from tandem.security.tls import ClientTls
from tests.kv_ends import FAILED, Recorder, ends, logged, push_and_commit
from tests.transports import make_pool


class SpoilingShm(ShmTransport):
    """Announces other checksums than it wrote bytes, while `spoils`."""

    spoils = True

    async def dial(self, pool: Pool, fields: Fields, tls: ClientTls | None) -> tuple[socket.socket, SendingLane]:
        sock, lane = await super().dial(pool, fields, tls)
        place: Callable[..., Any] = lane.place

        async def spoilt(*args: Any) -> tuple[int, ...]:
            return tuple(each ^ self.spoils for each in await place(*args))

        lane.place = spoilt  # type: ignore[method-assign]
        return sock, lane


def spoiling(choice: str, barred: list[str]) -> Any:
    """`async with spoiling("auto", barred) as (pair, shm)`'s pair; `barred` gets the names."""
    sender = {"known": (SpoilingShm(), TcpTransport()), "on_barred": barred.append}
    return ends(make_pool("shm"), make_pool("shm"), choice, ("shm", "tcp"), sender=sender)


async def hand_over(pair: Any) -> str | None:
    """Returns the transport, or None where the hand-off failed by checksum."""
    recorder = Recorder()
    try:
        handoff = await pair.begin(recorder, (1,))
        try:
            return str((await push_and_commit(handoff, (2,))).transport)
        finally:
            await handoff.abort()
    except ChecksumMismatch:
        await recorder.until("writer_stopped")
        assert recorder.calls == FAILED
        return None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), max_size=8))
def test_it_is_barred_after_failures_in_a_row_and_not_before(spoilt: list[bool]) -> None:
    async def run() -> None:
        barred: list[str] = []
        in_a_row = 0
        async with spoiling("auto", barred) as pair:
            shm = pair.sender._transports[0]
            for shm.spoils in spoilt:
                is_barred = in_a_row == CORRUPT_IN_A_ROW
                expected = "tcp" if is_barred else None if shm.spoils else "shm"
                assert await hand_over(pair) == expected
                in_a_row = in_a_row if is_barred else in_a_row + 1 if shm.spoils else 0
            assert barred == ["shm"] * (in_a_row == CORRUPT_IN_A_ROW)

    asyncio.run(run())


async def test_the_next_hand_off_says_why_it_goes_by_another_transport(caplog: pytest.LogCaptureFixture) -> None:
    async with spoiling("auto", []) as pair:
        assert [await hand_over(pair) for _ in range(2)] == [None, None]
        caplog.set_level(logging.INFO, logger="kvtransfer.sender")
        report = await pair.hand_over(Recorder(), (3,), (4,))
    assert report.transport == "tcp"
    assert report.passed_over.startswith("shm: barred, as checksums failed: the peer says: block at position 0 differs")
    assert "kv transport chosen" in logged(caplog)


async def test_another_life_of_the_peer_is_handed_over_to_by_the_barred_transport_again() -> None:
    async with spoiling("auto", []) as pair, spoiling("auto", []) as restarted:
        for _ in range(2):
            await hand_over(pair)
        pair.sender._transports[0].spoils = False
        offer = restarted.offer(Recorder(), (1,))
        assert (await push_and_commit(await pair.open(offer), (2,))).transport == "shm"


async def test_other_hand_offs_of_the_link_end_with_it(recorder: Recorder) -> None:
    async with spoiling("auto", []) as pair:
        other = await pair.begin(recorder, (5,))
        assert [await hand_over(pair) for _ in range(2)] == [None, None]
        with pytest.raises(ChecksumMismatch):
            await other.push(0, (6,))
        await recorder.until("writer_stopped")


async def test_a_forced_transport_is_dialled_anew() -> None:
    async with spoiling("shm", barred := []) as pair:
        assert [await hand_over(pair) for _ in range(3)] == [None] * 3
        pair.sender._transports[0].spoils = False
        assert await hand_over(pair) == "shm"
    assert barred == ["shm"]
