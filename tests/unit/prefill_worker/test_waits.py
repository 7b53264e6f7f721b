"""Prompts that wait: in line, or computed for a grant; and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.types import WaitReason


async def test_a_prompt_computed_before_its_grant_gives_its_first_token_and_keeps_its_blocks(
    bench: Any, make_spec: Any
) -> None:
    handle = bench.prefill(1, make_spec(10), grant=False)
    await bench.router.until(lambda: bench.router.first_tokens.get(handle))
    assert bench.router.started == [handle]
    assert bench.pool.counts().live == 3
    bench.worker.report_waits()
    assert bench.router.waits == {WaitReason.GRANT: [handle]}
    bench.grant(handle)
    await bench.router.until(lambda: handle in bench.router.handoffs)
    (handoff,) = bench.sender.handoffs
    assert (handoff.ticket, [first for first, _ in handoff.pushes]) == (b"ticket-1", [0])


@pytest.mark.parametrize("how", ["release", "router_lost", "deadline"])
async def test_blocks_that_wait_for_a_grant_come_back_when_the_request_ends(
    bench: Any, make_spec: Any, how: str
) -> None:
    handle = bench.prefill(1, make_spec(10, timeout_s=5), grant=False)
    await bench.router.until(lambda: bench.router.first_tokens.get(handle))
    if how == "release":
        bench.worker.release(bench.router, handle)
    elif how == "router_lost":
        bench.worker.router_lost(bench.router)
    else:
        bench.clock.advance_s(6)
        bench.worker.tick()
    await bench.settles()
    bench.grant(handle)
    assert bench.sender.handoffs == []


async def test_the_first_grant_counts(bench: Any, make_spec: Any) -> None:
    handle = bench.prefill(1, make_spec(10))
    bench.worker.grant(bench.router, handle, b"another", b"endpoint")
    await bench.router.until(lambda: handle in bench.router.handoffs)
    assert [each.ticket for each in bench.sender.handoffs] == [b"ticket-1"]


async def test_a_prompt_is_told_as_started_at_its_first_chunk_and_not_before(bench: Any, make_spec: Any) -> None:
    bench.engine.gate.close()
    handles = [bench.prefill(number, make_spec(40), grant=False) for number in (1, 2)]
    await bench.engine.gate.reached()
    assert bench.router.started == handles[:1]
    bench.worker.report_waits()
    assert bench.router.waits == {WaitReason.PROMPT: handles[:1], WaitReason.PREFILL_LINE: handles[1:]}


async def test_a_line_that_nothing_here_can_move_is_not_named(bench: Any, make_spec: Any) -> None:
    bench.sender.abort_gate.close()
    bench.sender.push_gate.close()
    stuck = bench.prefill(1, make_spec(60))
    await bench.sender.push_gate.reached()
    await bench.router.until(lambda: bench.router.first_tokens.get(stuck))
    bench.prefill(2, make_spec(40, cache_salt="other"))
    bench.worker.release(bench.router, stuck)
    await bench.sender.abort_gate.reached()
    bench.worker.report_waits()
    assert bench.router.waits == {}
