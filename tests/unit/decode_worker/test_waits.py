"""What a decode worker says of requests that get no tokens."""

from __future__ import annotations

from typing import Any

from tandem.types import Handle, WaitReason


async def test_who_waits_is_told_with_the_reason(open_bench: Any, make_spec: Any) -> None:
    async with open_bench(num_blocks=8, max_seqs=2) as bench:
        bench.engine.hold()
        running = bench.reserve(1, make_spec(9, 3), local_prefill=True)
        await bench.engine.until_launched(1)
        coming = bench.reserve(2, make_spec(5, 3, salt=1))
        await bench.ticket(coming)
        queued = bench.reserve(3, make_spec(20, 3, salt=2))
        bench.worker.report_waits()
        assert bench.router.waits == {WaitReason.HANDOFF: [coming], WaitReason.ROOM: [queued]}
        for handle in (coming, queued):
            bench.worker.release(bench.router, handle)
        bench.engine.let_go()
        await bench.router.until(lambda: running in bench.router.ended)


async def test_a_line_that_nothing_here_can_move_is_not_named(open_bench: Any, make_spec: Any) -> None:
    async with open_bench(num_blocks=8) as bench:
        stuck = bench.reserve(1, make_spec(30, 2))
        ticket = await bench.ticket(stuck)
        bench.receiver.show(ticket)
        bench.reserve(2, make_spec(20, 2))
        bench.worker.report_waits()
        assert bench.router.waits == {WaitReason.HANDOFF: [stuck], WaitReason.ROOM: [Handle(2)]}
        bench.router.waits.clear()
        bench.worker.release(bench.router, stuck)  # its blocks are quarantined, and no word of the writer comes
        bench.worker.report_waits()
        assert bench.router.waits == {}
        bench.receiver.writer_stops(ticket)
        bench.worker.release(bench.router, Handle(2))
