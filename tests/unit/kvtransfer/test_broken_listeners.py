"""A listener or a lane with a bug ends its own hand-off, and no block waits for ever."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer import receiver
from kvtransfer.offers import OfferTable
from tandem.errors import TransferError
from tests.transports import EVERY


def breaks(listener: Any, call: str) -> None:
    """From now on that call does its work and then raises what nobody foresaw."""
    told = getattr(listener, call)

    def tell(*args: object) -> None:
        told(*args)
        raise KeyError("a bug in a listener")

    setattr(listener, call, tell)


async def hand_over(pair: Any, listener: Any, blocks: tuple[int, ...], source: int) -> None:
    handoff = await pair.open(pair.offer(listener, blocks))
    await handoff.push(0, (source,) * len(blocks))
    await handoff.commit(b"")


@pytest.mark.parametrize("transport", EVERY)
@pytest.mark.parametrize("call", ["on_receiving", "on_committed"])
async def test_a_listener_that_breaks_fails_its_hand_off_and_no_other(
    paired: Callable[..., Any], make_recorder: Any, transport: str, call: str
) -> None:
    async with paired(transport) as pair:
        healthy, broken, later = make_recorder(), make_recorder(), make_recorder()
        broken.breaks_at_commit = call == "on_committed"
        open_before = await pair.open(pair.offer(healthy, (1, 2)))
        breaks(broken, call)
        with pytest.raises(TransferError, match="listener"):
            await hand_over(pair, broken, (3,), source=4)
        assert broken.calls[-2:] == ["failed", "writer_stopped"]
        await open_before.push(0, (9, 8))
        await open_before.commit(b"")
        await hand_over(pair, later, (3,), source=5)  # its blocks may be offered again
        assert healthy.calls == later.calls == ["receiving", "committed"]
        assert pair.receiver.num_live == 0


@pytest.mark.parametrize("transport", EVERY)
@pytest.mark.parametrize("call", ["on_failed", "on_writer_stopped"])
async def test_a_listener_that_breaks_at_a_failure_holds_up_no_other(
    paired: Callable[..., Any], make_recorder: Any, transport: str, call: str
) -> None:
    async with paired(transport) as pair:
        healthy, broken = make_recorder(), make_recorder()
        open_before = await pair.open(pair.offer(healthy, (1, 2)))
        given_up = await pair.open(pair.offer(broken, (3,)))
        breaks(broken, call)
        await given_up.abort()
        await broken.until("writer_stopped")
        await open_before.push(0, (9, 8))
        await open_before.commit(b"")
        assert healthy.calls == ["receiving", "committed"]
        assert pair.receiver.num_live == 0


@pytest.mark.parametrize("transport", EVERY)
async def test_a_session_that_breaks_lets_go_of_every_block(
    paired: Callable[..., Any], make_recorder: Any, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bool:
        raise KeyError("a bug of ours")

    async with paired(transport) as pair:
        first, second, later = (make_recorder() for _ in range(3))
        handoffs = [await pair.open(pair.offer(first, (1, 2))), await pair.open(pair.offer(second, (3,)))]
        with monkeypatch.context() as patched:
            patched.setattr(OfferTable, "verify", broken)
            with contextlib.suppress(TransferError):  # it may be heard of here already
                await handoffs[0].push(0, (9,))
            await first.until("writer_stopped")
            await second.until("writer_stopped")
        with pytest.raises(TransferError):
            await handoffs[1].commit(b"")
        assert pair.receiver.num_live == 0
        pair.offer(later, (1, 2, 3))  # which it refuses while one of them is lent


async def test_a_connection_that_a_bug_breaks_does_not_end_the_endpoint(
    paired: Callable[..., Any], make_recorder: Any
) -> None:
    async with paired("tcp") as pair:
        first, later = make_recorder(), make_recorder()
        with pytest.MonkeyPatch.context() as patch:

            def breaks_down(*_: object) -> None:
                raise RuntimeError("a bug in a transport")

            patch.setattr(receiver, "Connection", breaks_down)
            with pytest.raises(TransferError):
                await hand_over(pair, first, (3,), source=4)
        await hand_over(pair, later, (5,), source=4)
        assert later.calls == ["receiving", "committed"]
