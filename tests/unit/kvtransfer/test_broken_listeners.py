"""A listener or a lane with a bug ends its own hand-off, and no block waits for ever."""

from __future__ import annotations

import contextlib

import pytest

from kvtransfer.offers import OfferTable
from tandem.errors import TransferError
from tests.kv_ends import RECEIVED, Recorder, paired, push_and_commit
from tests.transports import EVERY


def breaking(call: str) -> Recorder:
    """A listener whose call does its work and then raises what nobody foresaw."""
    listener = Recorder(breaks_at_commit=call == "on_committed")
    whole = getattr(listener, call)

    def broken(*args: object) -> None:
        whole(*args)
        raise KeyError("a bug in a listener")

    setattr(listener, call, broken)
    return listener


@pytest.mark.parametrize("transport", EVERY)
@pytest.mark.parametrize("call", ["on_receiving", "on_committed"])
async def test_a_listener_that_breaks_fails_its_hand_off_and_no_other(transport: str, call: str) -> None:
    async with paired(transport) as pair:
        healthy, broken = Recorder(), breaking(call)
        open_before = await pair.begin(healthy, (1, 2))
        with pytest.raises(TransferError, match="listener"):
            await pair.hand_over(broken, (3,))
        assert broken.calls[-2:] == ["failed", "writer_stopped"]
        await push_and_commit(open_before, (9, 8))
        await pair.hand_over(Recorder(), (3,))  # its blocks may be offered again
        assert healthy.calls == RECEIVED
        assert pair.receiver.num_live == 0


@pytest.mark.parametrize("transport", EVERY)
@pytest.mark.parametrize("call", ["on_failed", "on_writer_stopped"])
async def test_a_listener_that_breaks_at_a_failure_holds_up_no_other(transport: str, call: str) -> None:
    async with paired(transport) as pair:
        healthy, broken = Recorder(), breaking(call)
        open_before, given_up = await pair.begin(healthy, (1, 2)), await pair.begin(broken, (3,))
        await given_up.abort()
        await broken.until("writer_stopped")
        await push_and_commit(open_before, (9, 8))
        assert healthy.calls == RECEIVED
        assert pair.receiver.num_live == 0


@pytest.mark.parametrize("transport", EVERY)
async def test_a_session_that_breaks_lets_go_of_every_block(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bool:
        raise KeyError("a bug of ours")

    async with paired(transport) as pair:
        first, second = Recorder(), Recorder()
        handoffs = [await pair.begin(first, (1, 2)), await pair.begin(second, (3,))]
        with monkeypatch.context() as patched:
            patched.setattr(OfferTable, "verify", broken)
            with contextlib.suppress(TransferError):  # it may be heard of here already
                await handoffs[0].push(0, (9,))
            await first.until("writer_stopped")
            await second.until("writer_stopped")
        with pytest.raises(TransferError):
            await handoffs[1].commit(b"")
        assert pair.receiver.num_live == 0
        pair.offer(Recorder(), (1, 2, 3))  # which it refuses while one of them is lent
