"""The workers that this router knows of: leases, incarnations, load, and what stands in the way.

    absent ──register──▶ registered ──lease ran out, stream ended, newer incarnation──▶ absent
                          │      ▲
                 engine stands   engine moves
                          ▼      │
                          stalled

`worker_added` is told on entering `registered`, `worker_lost` on leaving it. Time is the clock
given; `tick` must be called every `tick_s`: what it is late by is time in which this router stood
still, and heard nobody. Knows nothing of gRPC or of requests.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from router.placement import Obstacle, WorkerView
from tandem.clock import Clock
from tandem.errors import HandshakeMismatch, InvalidRequest, Unavailable
from tandem.types import Incarnation, WorkerId, WorkerInfo, WorkerLoad

_REMEMBERED_INCARNATIONS = 1024
_TICKS_PER_LEASE = 20
_LONGEST_TICK_S = 0.25


class WorkerListener(Protocol):
    """Told when a worker may be used, and when no longer. Must not raise."""

    def worker_added(self, info: WorkerInfo) -> None:
        """It registered, or its engine moves again."""
        ...

    def worker_lost(self, info: WorkerInfo, why: str) -> None:
        """Its lease ended, a newer incarnation came, or its engine stands still."""
        ...

    def worker_changed(self, info: WorkerInfo) -> None:
        """Something placement looks at is different."""
        ...


class _Record:
    """What is known of one worker."""

    def __init__(self, info: WorkerInfo, now_s: float) -> None:
        self.info = info
        self.load: WorkerLoad | None = None
        self.heard_s = now_s
        self.moved_s = now_s
        self.assigned_tokens = 0
        self.connected = False
        self.drain_ordered = False
        self.stalled = False

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
        if self.stalled:
            return Obstacle.STALLED
        if not self.connected:
            return Obstacle.NOT_CONNECTED
        if self.load is None:
            return Obstacle.NOT_HEARD
        if self.drain_ordered or self.load.draining:
            return Obstacle.DRAINING
        return None


class Registry:
    """All workers by name. Single-threaded; nothing here awaits."""

    def __init__(self, model: str, config_fingerprint: str, clock: Clock, lease_s: float, stall_s: float) -> None:
        self._model = model
        self._config_fingerprint = config_fingerprint
        self._clock = clock
        self._lease_s = lease_s
        self._stall_s = stall_s
        self._awake_s = clock.now_s()
        self._records: dict[WorkerId, _Record] = {}
        self._superseded: deque[Incarnation] = deque(maxlen=_REMEMBERED_INCARNATIONS)
        self._listeners: list[WorkerListener] = []

    @property
    def lease_s(self) -> float:
        """How long a silent worker is trusted."""
        return self._lease_s

    @property
    def tick_s(self) -> float:
        """How often `tick` is to be called."""
        return min(_LONGEST_TICK_S, self._lease_s / _TICKS_PER_LEASE)

    def subscribe(self, listener: WorkerListener) -> None:
        """Tells `listener` of everything from now on."""
        self._listeners.append(listener)

    def register(self, info: WorkerInfo) -> None:
        """Lets a worker in; a newer incarnation of a known name replaces the old at once.

        Raises HandshakeMismatch that names the field in which it differs from this router, and
        InvalidRequest for an info that lacks something.
        """
        _check_complete(info)
        for name, ours in (("model", self._model), ("config_fingerprint", self._config_fingerprint)):
            if getattr(info, name) != ours:
                raise HandshakeMismatch(name, ours, getattr(info, name))
        self._check_not_superseded(info)
        known = self._records.get(info.worker_id)
        if known is not None and known.info.incarnation == info.incarnation:
            known.heard_s = self._clock.now_s()
            return
        if known is not None:
            self._superseded.append(known.info.incarnation)
            self._remove(known, f"worker {info.worker_id} has restarted")
        self._records[info.worker_id] = _Record(info, self._clock.now_s())
        for listener in self._listeners:
            listener.worker_added(info)

    def heartbeat(self, info: WorkerInfo, load: WorkerLoad) -> None:
        """Renews the lease, or registers a worker again that was removed for its silence. Raises as `register`."""
        self._forgive_standstill()
        self.register(info)
        record = self._records[info.worker_id]
        record.take_load(load, self._clock.now_s())
        self._judge_engine(record)
        self._tell_changed(record)

    def deregister(self, info: WorkerInfo) -> None:
        """The worker's stream ended. Idempotent; ignores an incarnation that was replaced."""
        record = self._current(info.worker_id, info.incarnation)
        if record is not None:
            self._remove(record, f"worker {info.worker_id} left")

    def set_connected(self, info: WorkerInfo, *, connected: bool) -> None:
        """Whether this router's stream to the worker stands."""
        record = self._current(info.worker_id, info.incarnation)
        if record is not None and record.connected != connected:
            record.connected = connected
            self._tell_changed(record)

    def assign(self, info: WorkerInfo, num_tokens: int) -> None:
        """Counts work given to a worker until its next heartbeat tells it itself."""
        record = self._current(info.worker_id, info.incarnation)
        if record is not None:
            record.assigned_tokens += num_tokens

    def order_drain(self, worker_id: WorkerId) -> WorkerInfo:
        """Gives the worker no new work from now on. Raises InvalidRequest for an unknown name."""
        record = self._records.get(worker_id)
        if record is None:
            raise InvalidRequest("worker_id", f"no worker {worker_id} is registered")
        record.drain_ordered = True
        self._tell_changed(record)
        return record.info

    def drain_ordered(self, info: WorkerInfo) -> bool:
        """Whether this life of the worker was told to drain."""
        record = self._current(info.worker_id, info.incarnation)
        return record is not None and record.drain_ordered

    def tick(self) -> None:
        """Ends leases that ran out and judges engines."""
        self._forgive_standstill()
        now_s = self._clock.now_s()
        for record in list(self._records.values()):
            if now_s - record.heard_s > self._lease_s:
                self._remove(record, f"worker {record.info.worker_id} was silent for {self._lease_s:g} s")
            else:
                self._judge_engine(record)

    def views(self) -> list[WorkerView]:
        """All workers, as placement sees them."""
        return [
            WorkerView(record.info, record.load, record.obstacle(), record.assigned_tokens)
            for record in self._records.values()
        ]

    def load(self, info: WorkerInfo) -> WorkerLoad | None:
        """The last heartbeat of this life of a worker; None if it is gone or was never heard."""
        record = self._current(info.worker_id, info.incarnation)
        return None if record is None else record.load

    def silence_s(self, info: WorkerInfo) -> float:
        """Time since the worker was last heard, without such in which this router stood still."""
        return self._clock.now_s() - self._records[info.worker_id].heard_s

    def connected(self, info: WorkerInfo) -> bool:
        """Whether this router's stream to the worker stands."""
        return self._records[info.worker_id].connected

    def _forgive_standstill(self) -> None:
        now_s = self._clock.now_s()
        late_s = now_s - self._awake_s - self.tick_s
        self._awake_s = now_s
        if late_s > 0:
            for record in self._records.values():
                record.forgive(late_s, now_s)

    def _judge_engine(self, record: _Record) -> None:
        """A live loop with a dead engine still sends heartbeats; only its step count tells."""
        stalled = self._clock.now_s() - record.moved_s > self._stall_s and bool(
            record.load and record.load.running_seqs
        )
        if stalled == record.stalled:
            return
        record.stalled = stalled
        for listener in self._listeners:
            if stalled:
                why = f"worker {record.info.worker_id} made no step for {self._stall_s:g} s"
                listener.worker_lost(record.info, why)
            else:
                listener.worker_added(record.info)

    def _remove(self, record: _Record, why: str) -> None:
        del self._records[record.info.worker_id]
        if not record.stalled:
            for listener in self._listeners:
                listener.worker_lost(record.info, why)

    def _tell_changed(self, record: _Record) -> None:
        for listener in self._listeners:
            listener.worker_changed(record.info)

    def _current(self, worker_id: WorkerId, incarnation: Incarnation) -> _Record | None:
        record = self._records.get(worker_id)
        return record if record is not None and record.info.incarnation == incarnation else None

    def _check_not_superseded(self, info: WorkerInfo) -> None:
        if info.incarnation in self._superseded:
            raise Unavailable(f"a newer incarnation of {info.worker_id} is registered")


def _check_complete(info: WorkerInfo) -> None:
    """Raises InvalidRequest that names what is missing."""
    for name in ("worker_id", "incarnation", "address", "model_fingerprint", "layout_fingerprint"):
        if not getattr(info, name):
            raise InvalidRequest(f"info.{name}", "must not be empty")
    if info.max_sequence_tokens < 1:
        raise InvalidRequest("info.max_sequence_tokens", "must be positive")
