"""The loop that turns the batch: plan, step, apply, tell each router once.

The engine computes in its own thread; while a step runs, the control loop is free. What a
step made for one router goes out in one call, which never awaits a reader. When nobody can
get on, the loop sleeps until `wake`.

A step that raises fails the sequences in it and nobody else; one whose logits are broken fails
alone. A bug in the planning itself ends `run`, and with it the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from decode_worker.arrival import Arrival, RouterPort
from decode_worker.resident import Resident
from decode_worker.roster import Roster, Share
from engine.engine_thread import EngineBroken
from engine.step import BrokenLogits, Sampled, ScheduledSeq
from tandem.clock import Clock
from tandem.errors import InternalError, TandemError
from tandem.telemetry.logging import get_logger
from tandem.telemetry.observers import StepReport, WorkerObserver
from tandem.types import Handle, TokenDelta

_log = get_logger(__name__)


class StepEngine(Protocol):
    """What computes a step; `engine.engine_thread.EngineThread` is one."""

    @property
    def num_steps(self) -> int:
        """Steps made since start."""
        ...

    async def step(self, batch: Sequence[ScheduledSeq]) -> Sequence[Sampled | None]:
        """One result per seq in order; None where nothing was to be sampled."""
        ...


class StepLoop:
    """Runs until cancelled. All on the control loop."""

    def __init__(
        self,
        roster: Roster,
        engine: StepEngine,
        clock: Clock,
        on_ended: Callable[[Arrival, TandemError | None], None],
        on_step_ended: Callable[[], None],
        observer: WorkerObserver,
    ) -> None:
        """`on_ended` once per sequence that finished (None) or broke; it must make it leave the roster."""
        self._roster = roster
        self._engine = engine
        self._clock = clock
        self._on_ended = on_ended
        self._on_step_ended = on_step_ended
        self._observer = observer
        self._work = asyncio.Event()

    def wake(self) -> None:
        """Something has changed: look again for work."""
        self._work.set()

    async def run(self) -> None:
        """Steps while there is work, sleeps while there is none. Ends by cancellation, or raises EngineBroken."""
        while True:
            self._work.clear()
            shares = self._roster.begin_step()
            if not shares:
                await self._work.wait()
                continue
            try:
                await self._step(shares)
            finally:
                self._roster.end_step()
            self._on_step_ended()

    async def _step(self, shares: tuple[Share, ...]) -> None:
        began_s = self._note_start(shares)
        try:
            outputs = await self._engine.step([share.scheduled for share in shares])
            self._report(shares, self._clock.now_s() - began_s)
            self._apply(shares, outputs)
        except EngineBroken as error:
            self._fail(shares, error)
            raise
        except Exception as error:  # noqa: BLE001 - the step's root: one bad batch must not stop the others
            _log.exception("a step failed", num_seqs=len(shares))
            self._fail(shares, error)

    def _note_start(self, shares: tuple[Share, ...]) -> float:
        """Returns the time."""
        now_s = self._clock.now_s()
        for share in shares:
            if share.resident.started_s is None:
                share.resident.started_s = now_s
                share.resident.arrival.observer.started()
        return now_s

    def _report(self, shares: tuple[Share, ...], seconds: float) -> None:
        num_tokens = num_decode_seqs = 0
        for share in shares:
            if share.num_tokens == 1 and not share.resident.owes_first_token:
                num_decode_seqs += 1
            else:
                num_tokens += share.num_tokens
        specs = tuple([share.resident.arrival.spec for share in shares])
        self._observer.step(StepReport(seconds, num_tokens, num_decode_seqs, specs))

    def _apply(self, shares: tuple[Share, ...], outputs: Sequence[Sampled | None]) -> None:
        fan_out: dict[RouterPort, list[tuple[Handle, TokenDelta]]] = {}
        ended: list[tuple[Arrival, TandemError | None]] = []
        for share, sampled in zip(shares, outputs, strict=True):
            resident = share.resident
            if resident not in self._roster:
                continue  # released while the step ran
            self._roster.advance(share)
            if sampled is None:
                continue
            if isinstance(sampled, BrokenLogits):
                ended.append((resident.arrival, sampled.error(resident.arrival.spec.request_id)))
                continue
            delta = resident.take_token(sampled)
            if resident.owes_first_token:
                self._announce_first(resident, delta)
            else:
                fan_out.setdefault(resident.arrival.router, []).append((resident.arrival.handle, delta))
            if delta.finish_reason is not None:
                ended.append((resident.arrival, None))
        for router, deltas in fan_out.items():
            router.deltas(deltas)
        for arrival, error in ended:
            self._on_ended(arrival, error)

    def _announce_first(self, resident: Resident, delta: TokenDelta) -> None:
        arrival, now_s = resident.arrival, self._clock.now_s()
        started_s = now_s if resident.started_s is None else resident.started_s
        resident.owes_first_token = False
        arrival.observer.first_token()
        arrival.router.prefill_done(arrival.handle, delta, started_s - arrival.arrived_s, now_s - started_s)

    def _fail(self, shares: tuple[Share, ...], error: Exception) -> None:
        reported = error if isinstance(error, TandemError) else InternalError(f"a step broke: {type(error).__name__}")
        for share in shares:
            if share.resident in self._roster:
                self._on_ended(share.resident.arrival, reported)
