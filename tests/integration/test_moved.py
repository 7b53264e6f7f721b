"""What a decode worker makes of requests that went on elsewhere, or should have."""

from __future__ import annotations

import asyncio

import pytest

from decode_worker import moves
from tandem.errors import FrameError, TandemError
from tandem.first_tokens import FirstTokens
from tests.integration.test_moves import TwoDecoders, drained_at, spec_of
from worker.admission import Forecast


async def test_one_with_more_tokens_than_a_hand_off_carries_fails_to_be_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_many(tokens: FirstTokens) -> bytes:
        raise FrameError("first tokens do not fit")

    async with TwoDecoders() as cores:
        cores.old.engine.hold()
        leaving, staying = (cores.start(spec_of(8, 40, salt)) for salt in (0, 1))
        await cores.step_until(lambda: len(leaving.tokens) >= 5 and len(staying.tokens) >= 5)
        cores.old.core.drain()
        monkeypatch.setattr(moves, "encode_first_tokens", too_many)
        await cores.move(leaving)
        cores.old.engine.let_go()
        with pytest.raises(TandemError) as failure:
            await leaving.task
        leaving.attempt.release()
        assert failure.value.retryable
        staying.task = asyncio.create_task(staying.attempt.stay())
        await cores.finish(staying)


async def test_what_went_on_elsewhere_is_no_completed_length(monkeypatch: pytest.MonkeyPatch) -> None:
    completed: list[int] = []
    monkeypatch.setattr(Forecast, "completed", lambda _, num_tokens: completed.append(num_tokens))
    async with drained_at(5, spec_of(8, 40)) as (cores, stream):
        await cores.move(stream)
        cores.old.engine.let_go()
        await cores.finish(stream)
    assert completed == [40]
