"""A decode worker whose pool is too small for what it runs gives a stream to another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from decode_worker.moves import Moves
from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from tandem.types import MoveReason
from tests.integration.test_moves import Stream, TwoDecoders, computed_tokens, drained_at, spec_of
from worker.tuning import MANY_PREEMPTIONS, OVERLOAD_S, STAY_S


@asynccontextmanager
async def overloaded(num_blocks: int) -> AsyncIterator[tuple[TwoDecoders, list[Stream], Stream]]:
    """Streams that do not fit together, and the one of them that was offered."""
    async with TwoDecoders(old_blocks=num_blocks) as cores:
        cores.old.engine.hold()
        streams = [cores.start(spec_of(6, 48, salt)) for salt in range(4)]

        def offered() -> list[Stream]:
            cores.old.core.tick()
            return [each for each in streams if each.attempt.leaves]

        await cores.step_until(offered)
        assert cores.old.core.load().preemptions >= MANY_PREEMPTIONS
        (first,) = offered()
        yield cores, streams, first


def moves(cores: TwoDecoders) -> list[tuple[Any, ...]]:
    return [call for each in cores.old.recorded.sequences for call in each.calls if call[0] == "Moved"]


async def test_an_overloaded_one_gives_one_stream_away_and_every_token_is_right() -> None:
    async with overloaded(16) as (cores, streams, first):
        assert first is streams[0], "who is never preempted is still there when another one has room"
        await cores.move(first)
        cores.old.engine.let_go()
        await cores.finish(*streams)
        assert moves(cores) == [("Moved", MoveReason.OVERLOAD)]
        assert computed_tokens(cores.new.engine.steps) < 48, "what moved was computed again"


async def test_an_overloaded_one_offers_one_at_a_time_and_each_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with TwoDecoders() as cores:
        cores.old.engine.hold()
        streams = [cores.start(spec_of(6, 30, salt)) for salt in range(3)]
        await cores.step_until(lambda: all(each.tokens for each in streams))
        monkeypatch.setattr(Moves, "_is_overloaded", lambda *_: True)
        for offered in (0, 1, 2, 0):
            cores.old.core.tick()
            await cores.until(streams[offered].task.done)
            assert [each.attempt.leaves for each in streams] == [each is streams[offered] for each in streams]
            streams[offered].task = asyncio.create_task(streams[offered].attempt.stay())  # nobody takes it
            await asyncio.sleep(0)
            cores.old.core.tick()
            assert not any(each.attempt.leaves for each in streams)
            cores.clock.advance_s(OVERLOAD_S)
        monkeypatch.undo()
        cores.old.engine.let_go()
        await cores.finish(*streams)
        assert moves(cores) == []


async def test_one_that_moved_stays_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moves, "_is_overloaded", lambda *_: True)
    async with drained_at(5, spec_of(8, 40)) as (cores, stream):
        await cores.move(stream)
        cores.old.engine.let_go()
        await cores.until(lambda: cores.new.engine.num_steps > 3)
        assert not stream.attempt.leaves
        leaving = cores.new.core._decodes._moves
        (request,) = cores.new.core._requests.values()
        leaving._sender = cores.wire
        for seconds, offered in ((STAY_S - 1.0, False), (1.0, True)):
            cores.clock.advance_s(seconds)
            leaving.relieve([request], cores.clock.now_s())
            assert (request in leaving._told) == offered


class Preempted:
    """A batch as overload is judged by."""

    num_preemptions = 0

    def more(self, num: int) -> Preempted:
        self.num_preemptions += num
        return self


@pytest.mark.parametrize(
    ("seen", "share", "is_overloaded"),
    [
        ([(0.0, 1), (OVERLOAD_S / 2, 1), (OVERLOAD_S, 1)], 0.1, True),
        ([(0.0, 1), (OVERLOAD_S / 2, 1), (OVERLOAD_S + 0.1, 1)], 0.1, False),  # this is how a pool is kept full
        ([(0.0, 5)], 0.1, True),
        ([(0.0, 5)], 0.5, False),  # there is room
        ([(0.0, 5), (OVERLOAD_S + 0.1, 0)], 0.1, False),
        ([(0.0, 2), (0.1, 0), (0.2, 0)], 0.1, False),
    ],
)
def test_many_preemptions_in_a_short_time_and_a_full_pool_are_overload(
    seen: list[tuple[float, int]], share: float, is_overloaded: bool
) -> None:
    cache = PrefixCache(BlockPool(100, 4))
    cache.allocate(round(100 * (1 - share)))
    batch: Any = Preempted()
    leaving = Moves(batch, cache, None, lambda *_: None, lambda: None)
    *_, last = [batch.more(num) and leaving._is_overloaded(at_s) for at_s, num in seen]
    assert last == is_overloaded
