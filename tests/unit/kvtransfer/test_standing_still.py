"""A receiver that stood still for longer than a lease hears what was said meanwhile; so does one whose peer did."""

import asyncio
import time
from contextlib import AsyncExitStack

from kvtransfer.frame import Frame, FrameType
from kvtransfer.messages import Commit, digest_of
from tests.kv_ends import FAILED, QUICK, RECEIVED, Recorder, paired
from tests.raw_sender import raw
from tests.transports import USABLE, telling

BLOCK = bytes(range(256))


def _stand_still():
    """Nothing on this loop runs, for longer than a lease."""
    time.sleep(1.5 * QUICK.lease_s)


def _say_now(peer, kind, number=0):
    """The bytes lie in the receiver's socket when this returns."""
    frame = Frame(kind, number).encode()
    assert peer.connection.sock.send(frame) == len(frame)


async def test_a_goodbye_said_meanwhile_frees_the_blocks(recorder):
    async with paired("shm") as pair:
        offer = pair.offer(recorder, (3,))
        async with raw(offer, "shm") as peer:
            await peer.open(offer)
            _say_now(peer, FrameType.BYE)
            _stand_still()
            await recorder.until("writer_stopped")
        assert "closed the connection" in str(recorder.error)


async def test_a_sign_of_life_said_meanwhile_keeps_the_handoff():
    async with AsyncExitStack() as stack:
        pairs = {each: await stack.enter_async_context(paired(each)) for each in USABLE}
        opened = {}
        for transport, pair in pairs.items():
            with telling(transport):
                recorder = Recorder()
                offer = pair.offer(recorder, (3,))
                peer = await stack.enter_async_context(raw(offer, transport))
                opened[transport] = (recorder, peer, await peer.open(offer))
        for _, peer, _ in opened.values():
            _say_now(peer, FrameType.HEARTBEAT)
        _stand_still()
        for transport, (recorder, peer, number) in opened.items():
            with telling(transport):
                announced = await peer.put(number, 3, BLOCK)
                assert (await peer.hear()).type is FrameType.WRITE_OK
                commit = Commit(1, digest_of([announced]), b"x").encode()
                assert (await peer.ask(FrameType.COMMIT, number, commit)).type is FrameType.COMMITTED
                assert recorder.calls == RECEIVED


async def test_a_peer_that_fell_silent_within_a_frame_can_still_say_goodbye(recorder):
    async with paired("shm", QUICK) as pair:
        offer = pair.offer(recorder, (3,))
        async with raw(offer, "shm") as peer:
            number = await peer.open(offer)
            peer.connection._writing.cancel()  # no heartbeat goes between the two halves
            drained = Frame(FrameType.DRAINED, number).encode()
            peer.connection.sock.send(drained[:10])
            await recorder.until("failed")
            assert "silent" in str(recorder.error)
            assert recorder.calls == FAILED[:2]
            await asyncio.get_running_loop().sock_sendall(peer.connection.sock, drained[10:])
            await recorder.until("writer_stopped")
