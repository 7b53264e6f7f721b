"""Random orders of arrivals, releases, faults and delays: each prompt ends once, nothing stays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.errors import PeerLost
from tandem.types import Handle

moves = st.lists(
    st.one_of(
        st.tuples(
            st.just("prefill"),
            st.tuples(
                st.integers(1, 40), st.lists(st.integers(0, 1), min_size=1, max_size=3), st.sampled_from(["", "salt"])
            ),
        ),
        st.tuples(st.just("grant"), st.integers(0, 20)),
        st.tuples(st.just("offers_start_at"), st.integers(0, 4)),
        st.tuples(st.just("release"), st.integers(0, 20)),
        st.tuples(st.just("close"), st.integers(0, 4)),
        st.tuples(st.just("open"), st.integers(0, 4)),
        st.tuples(st.just("let_one_pass"), st.integers(0, 4)),
        st.tuples(st.just("break_transfer"), st.sampled_from(["open", "push", "commit"])),
        st.tuples(st.just("break_step"), st.just(0)),
        st.tuples(st.just("turn_loop"), st.integers(1, 12)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=moves, host_rows=st.sampled_from([0, 4, 40]))
def test_every_prompt_ends_once_and_every_block_comes_back(
    bench_type: Any, make_spec: Any, moves: list[tuple[str, Any]], host_rows: int
) -> None:
    asyncio.run(play(lambda: bench_type(host_rows=host_rows), make_spec, moves))


class Player:
    """Makes moves on a bench; each method is one kind."""

    def __init__(self, bench: Any, make_spec: Any) -> None:
        self.bench = bench
        self.make_spec = make_spec
        self.handles: set[Handle] = set()
        self.released: set[Handle] = set()

    async def prefill(self, asked: tuple[int, list[int], str]) -> None:
        num_tokens, num_output_tokens, cache_salt = asked
        spec = self.make_spec(num_tokens, num_output_tokens=num_output_tokens, cache_salt=cache_salt)
        self.handles.add(self.bench.prefill(len(self.handles) + 1, spec, grant=False))

    async def grant(self, handle: int) -> None:
        self.bench.grant(handle)

    async def offers_start_at(self, first_block: int) -> None:
        self.bench.sender.first_block = first_block

    async def release(self, handle: int) -> None:
        self.bench.worker.release(self.bench.router, Handle(handle))
        self.released.add(Handle(handle))

    async def close(self, gate: int) -> None:
        self.bench.gates[gate].close()

    async def open(self, gate: int) -> None:
        await self.bench.gates[gate].open()

    async def let_one_pass(self, gate: int) -> None:
        await self.bench.gates[gate].let_one_pass()

    async def break_transfer(self, call: str) -> None:
        self.bench.sender.errors[call] = PeerLost("connection reset")

    async def break_step(self, _: int) -> None:
        self.bench.engine.error = RuntimeError("broken")

    async def turn_loop(self, num_turns: int) -> None:
        for _ in range(num_turns):
            await asyncio.sleep(0)


async def play(make_bench: Callable[[], Any], make_spec: Any, moves: list[tuple[str, Any]]) -> None:
    bench = make_bench()
    player = Player(bench, make_spec)
    for name, value in moves:
        await getattr(player, name)(value)
        bench.cache.check_invariants()
    for gate in bench.gates:
        await gate.open()
    for handle in player.handles:
        await player.grant(handle)
    await bench.settles()
    check_ends(bench, player)
    await bench.close()


def check_ends(bench: Any, player: Player) -> None:
    committed, failed = set(bench.router.handoffs), set(bench.router.errors)
    assert not committed & failed
    assert player.handles - player.released <= committed | failed
    assert committed | failed <= player.handles
