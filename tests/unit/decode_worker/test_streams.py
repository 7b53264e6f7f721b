"""For whom a decode worker keeps its steps short: `RunningBatch.num_decodes`, and the line of its prompts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.decode_rows import seqs_of


async def test_a_hand_off_decodes_once_it_is_there(open_bench: Any, make_spec: Any) -> None:
    async with open_bench() as bench:
        batch = bench.batch
        assert (batch.num_decodes, batch.wait_ratio) == (0, 0)
        specs = [make_spec(9, 6, salt=salt) for salt in (1, 2)]
        coming = [bench.reserve(handle, spec) for handle, spec in enumerate(specs, 1)]
        tickets = [await bench.ticket(each) for each in coming]
        assert batch.num_decodes == 0
        bench.engine.hold()
        for ticket, spec in zip(tickets, specs, strict=True):
            bench.hand_off(ticket, spec)
        assert batch.num_decodes == 2
        bench.engine.let_go()
        await bench.router.until(lambda: set(coming) <= set(bench.router.ended))


async def test_the_line_is_all_prompts_that_are_to_be_computed_here(open_bench: Any, make_spec: Any) -> None:
    async with open_bench(chunk_tokens=40, max_seqs=8) as bench:
        bench.engine.hold()
        handles = [bench.reserve(salt, make_spec(40, 2, salt=salt), local_prefill=True) for salt in range(1, 5)]
        await bench.engine.until_launched(1)
        waiting = bench.batch.wait_ratio
        assert waiting == 3, "one is in the step; the last one waits for the others"
        bench.engine.let_go()
        await bench.router.until(lambda: set(handles) <= set(bench.router.ended))
        assert bench.batch.wait_ratio == 0


async def test_the_first_chunk_of_a_prompt_whose_beginning_is_cached_is_bounded_too(
    open_bench: Any, make_spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(chunk_tokens=100) as bench:
        first = bench.reserve(1, make_spec(20, 2), local_prefill=True)
        await bench.router.until(lambda: first in bench.router.ended)
        monkeypatch.setattr(bench.batch.budget, "tokens", lambda *_, **__: 10)
        longer = bench.reserve(2, make_spec(60, 1), local_prefill=True)
        await bench.router.until(lambda: longer in bench.router.ended)
        assert max(len(seq.token_ids) for step in bench.engine.steps[2:] for seq in seqs_of(step)) == 10
