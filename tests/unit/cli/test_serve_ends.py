"""`tandem serve` ends within its grace, whatever its children do and whenever the signal comes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cli import serve
from cli.liveness import CHECK_S, FROZEN_GRACE_S
from cli.serve import STOP_MARGIN_S
from shell.config import DecodeConfig, RouterConfig, ServeConfig
from shell.rpc.process import StopSignal
from simulator.loop import SimulatedClock, run_simulated
from tandem.cluster_status import ClusterStatus
from tandem.errors import DeadlineExceeded, Reason, TandemError, Unavailable

GRACE_S = 20.0
ENDS_WITHIN_S = 3 * (GRACE_S + STOP_MARGIN_S + CHECK_S + FROZEN_GRACE_S)
"""The door, the routers and the workers stop one after the other."""


@dataclass(frozen=True)
class Life:
    """What one child does, in seconds from its start or from its SIGTERM; None = never."""

    ready_s: float | None = 1.0
    dies_s: float | None = None
    code: int = -9
    heeds_term_s: float | None = 0.0
    answers: bool = True
    can_start: bool = True


@dataclass(frozen=True)
class Signal:
    """When SIGTERM comes: at a time, so many turns of the loop later; and how long after it another one."""

    at_s: float
    turns: int
    again_s: float | None = None


class FakeChild:
    """In place of `cli.supervisor.Child`."""

    def __init__(self, machine: Machine, life: Life, address: str) -> None:
        self.last_words = ""
        self.life, self.address = life, address
        self._machine = machine
        self._ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        if life.ready_s is not None:
            loop.call_later(life.ready_s, self._become_ready)
        if life.dies_s is not None:
            loop.call_later(life.dies_s, self._end, life.code)

    @property
    def lives(self) -> bool:
        return not self._code.done()

    @property
    def listens(self) -> bool:
        return self.lives and self._ready.done()

    async def ready(self) -> str | None:
        return await asyncio.shield(self._ready)

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        if self.life.heeds_term_s is not None:
            asyncio.get_running_loop().call_later(self.life.heeds_term_s, self._end, 0)

    def kill(self) -> None:
        self._end(-9)

    def _become_ready(self) -> None:
        if self.lives:
            self._ready.set_result(self.address)
            self._machine.look()

    def _end(self, code: int) -> None:
        if self.lives:
            self._code.set_result(code)
            if not self._ready.done():
                self._ready.set_result(None)


class Machine:
    """Stands in for what `cli.serve` starts and calls. Children take the lives drawn, in order of their starts."""

    def __init__(self, lives: Sequence[Life]) -> None:
        self._lives: Iterator[Life] = iter(lives)
        self.children: list[FakeChild] = []
        self.serves = asyncio.Event()

    def look(self) -> None:
        """Says SERVING once two workers and a router listen."""
        if sum(child.listens for child in self.children) >= 3:
            self.serves.set()

    # `cli.serve.Child`, `open_process`

    def child(self, process: Life, sink: object) -> FakeChild:
        self.children.append(FakeChild(self, process, f"127.0.0.1:{len(self.children) + 1}"))
        return self.children[-1]

    def open_process(self, command: Sequence[str]) -> Life:
        life = next(self._lives, Life())
        if not life.can_start:
            raise OSError("no process left")
        return life

    def connect(self, address: str, **_: Any) -> FakeClient:
        return FakeClient(self, address)


class FakeClient:
    """Of the child at one address: in place of `AsyncClient`."""

    def __init__(self, machine: Machine, address: str) -> None:
        self._machine = machine
        self._child = next(child for child in machine.children if child.address == address)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None: ...

    async def wait_ready(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._machine.serves.wait(), timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded("not ready") from error

    async def status(self) -> ClusterStatus:
        if not self._child.lives:
            raise Unavailable("Connection refused", Reason.PEER_LOST)
        return ClusterStatus("demo", True, "", 0, 0, 0, ())

    async def serving(self, service: str, *, timeout_s: float) -> bool:
        if not self._child.lives:
            raise Unavailable("Connection refused", Reason.PEER_LOST)
        await asyncio.sleep(0 if self._child.life.answers else timeout_s)
        if not self._child.life.answers:
            raise DeadlineExceeded("no answer")
        return True


async def ends(signal_: Signal, lives: Sequence[Life]) -> None:
    """Raises AssertionError unless all ends within the grace after the signal."""
    machine, stop = Machine(lives), StopSignal()
    config = ServeConfig(
        num_workers=2,
        router=RouterConfig(drain_grace_s=GRACE_S),
        decode_worker=DecodeConfig(threads=1),  # lends no cores
    )

    async def deliver() -> None:
        await asyncio.sleep(signal_.at_s)
        for _ in range(signal_.turns):
            await asyncio.sleep(0)
        stop.deliver(signal.SIGTERM)
        if signal_.again_s is not None:
            await asyncio.sleep(signal_.again_s)
            stop.deliver(signal.SIGTERM)
            assert not any(child.lives for child in machine.children)

    with pytest.MonkeyPatch.context() as patch:
        for name, fake in (
            *(("Child", machine.child), ("open_process", machine.open_process)),
            *(("AsyncClient", machine.connect), ("MonotonicClock", SimulatedClock)),
        ):
            patch.setattr(serve, name, fake)
        patch.setattr(os, "_exit", lambda code: None)
        delivered = asyncio.create_task(deliver())
        serving = asyncio.create_task(serve._serve(config, serve.fleet_devices(config, ()), stop))
        await asyncio.wait({serving}, timeout=signal_.at_s + ENDS_WITHIN_S)
        assert serving.done()
        try:
            serving.result()
            await delivered
        except* TandemError:  # a child that refused its options, or never got ready
            delivered.cancel()
    assert not any(child.lives for child in machine.children)
    assert asyncio.all_tasks() <= {asyncio.current_task(), delivered}


def at_times(*more: float | None) -> st.SearchStrategy[Any]:
    """Few, so that things happen at the same time."""
    return st.sampled_from([0.0, 1.0, 2.0, 2.5, 3.0, *more])


LIVES = st.builds(
    Life,
    ready_s=at_times(None),
    dies_s=at_times(None, None, None),
    code=st.sampled_from([-9, 0, 1, 2]),
    heeds_term_s=at_times(None),
    answers=st.booleans(),
    can_start=st.sampled_from([True, True, True, False]),
)


@given(
    signal_=st.builds(Signal, at_times(4.0, 12.0), st.integers(0, 12), at_times(None, None, None)),
    lives=st.lists(LIVES, max_size=6),
)
@example(Signal(3.0, 0), [Life(), Life(ready_s=None), Life(ready_s=None)])  # while the workers load
@example(Signal(2.0, 1), [])  # as they become ready
def test_it_ends_within_the_grace_whatever_children_do_and_whenever_the_signal_comes(
    signal_: Signal, lives: list[Life]
) -> None:
    run_simulated(ends(signal_, lives))
