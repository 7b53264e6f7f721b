"""Who gets blocks and seats when there are too few: simulations in steps, with hand-offs that take a known number.

One turn is the time of one step. Prefill workers take hand-offs in order of their tickets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.types import GroupSpec, Handle
from tests.decode_rows import seqs_of

MakeSpec = Callable[..., GroupSpec]


@dataclass
class Simulation:
    """Plays the prefill workers, lets a step end each turn, and counts."""

    bench: Any
    handoff_turns: int
    """From a hand-off's start to its commit."""
    num_parallel: int
    """Hand-offs at a time; others wait for their turn with their blocks reserved."""
    specs: dict[Handle, GroupSpec] = field(default_factory=dict)
    turn: int = 0
    last_turn: dict[Handle, int] = field(default_factory=dict)
    """In which turn each request got its last token."""
    gaps: dict[Handle, int] = field(default_factory=dict)
    """Longest time between two tokens, in turns."""
    num_seated: list[int] = field(default_factory=list)
    """Seats taken, per turn."""
    _left: dict[Handle, int] = field(default_factory=dict)
    """Turns that each granted hand-off still needs."""
    _known: dict[Handle, int] = field(default_factory=dict)

    def arrive(self, spec: GroupSpec) -> Handle:
        handle = self.bench.reserve(len(self.specs), spec)
        self.specs[handle] = spec
        return handle

    @property
    def num_live(self) -> int:
        return len(self.specs) - len(self.bench.router.ended)

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed more than once: every prompt comes by hand-off."""
        return sum(len(seq.token_ids) - 1 for step in self.bench.engine.steps for seq in seqs_of(step))

    async def play(self, num_turns: int) -> None:
        self.bench.engine.hold()
        for _ in range(num_turns):
            await self._settle()
            self._hand_off()
            await self._settle()
            self.num_seated.append(self.bench.worker.load().running_seqs)
            if self.bench.engine.num_in_flight:
                self.bench.engine.allow()
            await self._settle()
            self.turn += 1
            self._note_tokens()
        self.bench.engine.let_go()

    async def give_up(self) -> None:
        """Releases all, and lets writers stop."""
        for handle in self.specs:
            self.bench.worker.release(self.bench.router, handle)
        for transfer_id in self.bench.receiver.offers:
            self.bench.receiver.writer_stops(transfer_id)

    async def _settle(self) -> None:
        for _ in range(12):  # iterations of the loop, until everybody has done what follows from the last event
            await asyncio.sleep(0)

    def _hand_off(self) -> None:
        router = self.bench.router
        for handle in router.tickets:
            self._left.setdefault(handle, self.handoff_turns)
        started = [handle for handle, left in self._left.items() if left > 0][: self.num_parallel]
        for handle in started:
            if self._left[handle] == self.handoff_turns:
                self.bench.receiver.show(router.tickets[handle])
            self._left[handle] -= 1
            if self._left[handle] == 0:
                self.bench.hand_off(router.tickets[handle], self.specs[handle])

    def _note_tokens(self) -> None:
        for handle in self.specs:
            num = len(self.bench.router.tokens.get(handle, ()))
            if num == self._known.get(handle, 0):
                continue
            if handle in self.last_turn:
                self.gaps[handle] = max(self.gaps.get(handle, 0), self.turn - self.last_turn[handle])
            self._known[handle], self.last_turn[handle] = num, self.turn


@pytest.mark.parametrize(("num_prompt_tokens", "handoff_turns"), [(300, 40), (140, 80)])
async def test_a_burst_of_long_prompts_leaves_running_streams_alone(
    open_bench: Any, make_spec: MakeSpec, num_prompt_tokens: int, handoff_turns: int
) -> None:
    """Blocks that prompts hold while they wait for a prefill worker are not those that streams need to grow."""
    async with open_bench(64, 16, max_seqs=16, overlap_steps=False, first_guess_tokens=400) as bench:
        simulation = Simulation(bench, handoff_turns, num_parallel=2)
        streams = [simulation.arrive(make_spec(20, 400, salt=number)) for number in range(2)]
        await simulation.play(handoff_turns + 5)
        simulation.arrive(make_spec(20, 5, salt=9))
        await simulation.play(handoff_turns + 5)
        for number in range(10):
            simulation.arrive(make_spec(num_prompt_tokens, 30, salt=10 + number))
        await simulation.play(440 - 2 * handoff_turns)
        assert [simulation.gaps[stream] for stream in streams] == [1, 1]
        assert bench.worker.load().preemptions == 0
        assert simulation.num_recomputed_tokens == 0
        while simulation.num_live:
            await simulation.play(50)


async def test_seats_stay_filled_where_a_handoff_takes_twice_the_time_of_decoding(
    open_bench: Any, make_spec: MakeSpec
) -> None:
    async with open_bench(512, 16, max_seqs=8, overlap_steps=False) as bench:
        simulation = Simulation(bench, handoff_turns=40, num_parallel=1000)
        for number in range(160):
            simulation.arrive(make_spec(8, 10 + number * 7 % 21, salt=number))
        await simulation.play(350)
        share = sum(simulation.num_seated[200:]) / (150 * 8)
        await simulation.give_up()
        assert share > 0.9


async def test_small_prompts_pass_a_large_one_that_waits_for_a_quarantined_block(
    open_bench: Any, make_spec: MakeSpec
) -> None:
    """However many: without that block it cannot be served. Once the block is back, it is."""
    async with open_bench(8, 4, overlap_steps=False) as bench:
        lost = bench.reserve(0, make_spec(4, 2))
        ticket = await bench.ticket(lost)
        bench.receiver.show(ticket)
        bench.worker.release(bench.router, lost)
        assert bench.pool.counts().quarantined == 1
        large = bench.reserve(1, make_spec(30, 2), local_prefill=True)
        small = [bench.reserve(2 + number, make_spec(4, 2), local_prefill=True) for number in range(9)]
        await bench.router.until(lambda: set(small) <= set(bench.router.ended))
        assert large not in bench.router.tickets
        bench.receiver.writer_stops(ticket)
        await bench.router.until(lambda: large in bench.router.ended)
