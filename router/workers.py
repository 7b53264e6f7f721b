"""The workers that this router knows of: leases, incarnations, load, a link to each; the pair for a request.

    absent ──register──▶ registered ──lease ran out, stream ended, newer incarnation──▶ absent
                          │      ▲
                 engine stands   engine moves
                          ▼      │
                          stalled

A link is opened on entering `registered` and closed on leaving it. Time is the clock given; `tick` must be
called every `tick_s`: what it is late by is time in which this router stood still, and heard nobody. Knows
nothing of gRPC or of requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import TypeAlias
from weakref import WeakSet

from router.placement import Demand, Obstacle, Placement, WorkerView, place
from router.placement import readiness as readiness_of
from router.worker_link import WorkerLink
from tandem.clock import Clock
from tandem.errors import HandshakeMismatch, InvalidRequest, Unavailable
from tandem.telemetry.logging import get_logger
from tandem.types import Incarnation, WorkerId, WorkerInfo, WorkerLoad

_REMEMBERED_INCARNATIONS = 1024
_TICKS_PER_LEASE = 20
_LONGEST_TICK_S = 0.25

_log = get_logger(__name__)

OpenLink: TypeAlias = Callable[[WorkerInfo, Callable[[], None]], WorkerLink]
"""Opens a link; the function given is to be called when its `connected` has changed."""


class _Record:
    """What is known of one worker."""

    def __init__(self, info: WorkerInfo, now_s: float) -> None:
        self.info = info
        self.load: WorkerLoad | None = None
        self.heard_s = now_s
        self.moved_s = now_s
        self.assigned_tokens = 0
        self.drain_ordered = False
        self.link: WorkerLink | None = None
        """None = stalled."""

    @property
    def connected(self) -> bool:
        return self.link is not None and self.link.connected

    def take_load(self, load: WorkerLoad, now_s: float) -> None:
        moved = self.load is None or load.engine_steps != self.load.engine_steps or load.running_seqs == 0
        self.moved_s = now_s if moved else self.moved_s
        self.load = load
        self.heard_s = now_s
        self.assigned_tokens = 0

    def forgive(self, seconds: float, now_s: float) -> None:
        """Does not count so much time as silence of the worker."""
        self.heard_s = min(now_s, self.heard_s + seconds)
        self.moved_s = min(now_s, self.moved_s + seconds)

    def obstacle(self) -> Obstacle | None:
        """Why it takes no new work."""
        if self.link is None:
            return Obstacle.STALLED
        if not self.link.connected:
            return Obstacle.NOT_CONNECTED
        if self.load is None:
            return Obstacle.NOT_HEARD
        if self.drain_ordered or self.load.draining:
            return Obstacle.DRAINING
        return None

    def view(self, now_s: float) -> WorkerView:
        silence_s = now_s - self.heard_s
        return WorkerView(self.info, self.load, self.obstacle(), self.assigned_tokens, silence_s, self.connected)


class Workers:
    """All workers by name. Single-threaded. Use as an async context manager: leaving it closes all links."""

    def __init__(
        self,
        model: str,
        config_fingerprint: str,
        clock: Clock,
        lease_s: float,
        stall_s: float,
        open_link: OpenLink,
        rng: Random,
    ) -> None:
        self.lease_s = lease_s
        """How long a silent worker is trusted."""
        self.tick_s = min(_LONGEST_TICK_S, lease_s / _TICKS_PER_LEASE)
        """How often `tick` is to be called."""
        self._expected = {"model": model, "config_fingerprint": config_fingerprint}
        self._clock = clock
        self._stall_s = stall_s
        self._open_link = open_link
        self._rng = rng
        self._awake_s = clock.now_s()
        self._records: dict[WorkerId, _Record] = {}
        self._superseded: deque[Incarnation] = deque(maxlen=_REMEMBERED_INCARNATIONS)
        self._links: WeakSet[WorkerLink] = WeakSet()
        """Also those of lost workers, until their tasks have ended."""
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Workers:
        return self

    async def __aexit__(self, *_: object) -> None:
        links = tuple(self._links)
        for link in links:
            link.close()
        await asyncio.gather(*(link.wait_closed() for link in links))

    # --- what workers tell ---

    def register(self, info: WorkerInfo) -> None:
        """Lets a worker in; a newer incarnation of a known name replaces the old at once.

        Raises HandshakeMismatch that names the field in which it differs from this router, and
        InvalidRequest for an info that lacks something.
        """
        _check_complete(info)
        for name, ours in self._expected.items():
            if getattr(info, name) != ours:
                raise HandshakeMismatch(name, ours, getattr(info, name))
        if info.incarnation in self._superseded:
            raise Unavailable(f"a newer incarnation of {info.worker_id} is registered")
        known = self._records.get(info.worker_id)
        if known is not None and known.info.incarnation == info.incarnation:
            known.heard_s = self._clock.now_s()
            return
        if known is not None:
            self._superseded.append(known.info.incarnation)
            self._remove(known, f"worker {info.worker_id} has restarted")
        record = self._records[info.worker_id] = _Record(info, self._clock.now_s())
        self._open(record)

    def heartbeat(self, info: WorkerInfo, load: WorkerLoad) -> None:
        """Renews the lease, or registers a worker again that was removed for its silence. Raises as `register`."""
        self._forgive_standstill()
        self.register(info)
        record = self._records[info.worker_id]
        record.take_load(load, self._clock.now_s())
        self._judge_engine(record)
        self._notify()

    def deregister(self, info: WorkerInfo) -> None:
        """The worker's stream ended. Idempotent; ignores an incarnation that was replaced."""
        record = self._current(info)
        if record is not None:
            self._remove(record, f"worker {info.worker_id} left")

    def order_drain(self, worker_id: WorkerId) -> WorkerInfo:
        """Gives the worker no new work from now on. Raises InvalidRequest for an unknown name."""
        record = self._records.get(worker_id)
        if record is None:
            raise InvalidRequest("worker_id", f"no worker {worker_id} is registered")
        record.drain_ordered = True
        self._notify()
        return record.info

    def drain_ordered(self, info: WorkerInfo) -> bool:
        """Whether this life of the worker was told to drain."""
        record = self._current(info)
        return record is not None and record.drain_ordered

    def tick(self) -> None:
        """Ends leases that ran out and judges engines."""
        self._forgive_standstill()
        now_s = self._clock.now_s()
        for record in list(self._records.values()):
            if now_s - record.heard_s > self.lease_s:
                self._remove(record, f"worker {record.info.worker_id} was silent for {self.lease_s:g} s")
            else:
                self._judge_engine(record)

    # --- what requests ask ---

    def link(self, info: WorkerInfo) -> WorkerLink | None:
        """The stream to this life of a worker; None if it is gone."""
        record = self._current(info)
        return None if record is None else record.link

    def views(self) -> list[WorkerView]:
        """All workers, as placement sees them."""
        now_s = self._clock.now_s()
        return [record.view(now_s) for record in self._records.values()]

    def readiness(self) -> str | None:
        """None if a request could be served now, else what is missing."""
        return readiness_of(self.views())

    async def place(self, demand: Demand, wait_s: float) -> Placement:
        """A pair for `demand`, counted as its workers' load; waits at most `wait_s` for one. Raises Unavailable."""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    changed = self._changed
                    try:
                        return self._place_now(demand)
                    except Unavailable:
                        await changed.wait()
        except TimeoutError:
            return self._place_now(demand)

    async def wait_for_change(self, at_most_s: float) -> None:
        """Returns when anything about any worker changed, or when the time is up."""
        try:
            async with asyncio.timeout(at_most_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _place_now(self, demand: Demand) -> Placement:
        placement = place(demand, self.views(), self._rng)
        for info in filter(None, (placement.prefill, placement.decode)):
            self._records[info.worker_id].assigned_tokens += demand.num_tokens
        return placement

    def _forgive_standstill(self) -> None:
        now_s = self._clock.now_s()
        late_s = now_s - self._awake_s - self.tick_s
        self._awake_s = now_s
        if late_s > 0:
            for record in self._records.values():
                record.forgive(late_s, now_s)

    def _judge_engine(self, record: _Record) -> None:
        """A live loop with a dead engine still sends heartbeats; only its step count tells."""
        has_work = record.load is not None and record.load.running_seqs > 0
        stalled = has_work and self._clock.now_s() - record.moved_s > self._stall_s
        if stalled and record.link is not None:
            self._close(record, f"worker {record.info.worker_id} made no step for {self._stall_s:g} s")
        elif not stalled and record.link is None:
            self._open(record)

    def _open(self, record: _Record) -> None:
        info = record.info
        _log.info("worker joined", worker_id=info.worker_id, role=info.role, address=info.address)
        record.link = self._open_link(info, self._notify)
        self._links.add(record.link)
        self._notify()

    def _close(self, record: _Record, why: str) -> None:
        """Ends the link, if there is one; its requests are told."""
        if record.link is None:
            return
        _log.warning("worker lost", worker_id=record.info.worker_id, role=record.info.role, why=why)
        record.link.close()
        record.link = None
        self._notify()

    def _remove(self, record: _Record, why: str) -> None:
        del self._records[record.info.worker_id]
        self._close(record, why)

    def _notify(self) -> None:
        """Sets the event of those who wait now; whoever comes later waits for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _current(self, info: WorkerInfo) -> _Record | None:
        """This life of the worker."""
        record = self._records.get(info.worker_id)
        return record if record is not None and record.info.incarnation == info.incarnation else None


def _check_complete(info: WorkerInfo) -> None:
    """Raises InvalidRequest that names what is missing."""
    for name in ("worker_id", "incarnation", "address", "model_fingerprint", "layout_fingerprint"):
        if not getattr(info, name):
            raise InvalidRequest(f"info.{name}", "must not be empty")
    if info.max_sequence_tokens < 1:
        raise InvalidRequest("info.max_sequence_tokens", "must be positive")
