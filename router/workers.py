"""The workers that this router knows of: leases, incarnations, load, a link to each; the pair for a request.

    absent ──register──▶ registered ──lease ran out, stream ended, newer incarnation──▶ absent
                          │      ▲
                 engine stands   engine moves
                          ▼      │
                          stalled

A link is opened on entering `registered` and closed on leaving it. Who failed lately is remembered beyond the request
(see `ejection`), and so is what was given to a worker and its heartbeats do not show yet. Time is the clock given;
`tick` must be called every `tick_s`: what it is late by is time in which this router stood still, and heard nobody.
Knows nothing of gRPC or of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import TypeAlias
from weakref import WeakSet

from router.assignment import Assignment
from router.ejection import Ejections, Subject
from router.fleet import Candidates, Fleet
from router.handoff_times import HandoffTimes
from router.placement import place, ready_seats
from router.placement import readiness as readiness_of
from router.prefix_map import Prefix, PrefixIndex
from router.serving_set import ServingSet, SetId
from router.worker_link import WorkerLink
from router.worker_record import WorkerRecord, check_complete
from router.worker_view import Demand, WorkerView
from shell.clock import Clock
from shell.telemetry.logging import get_logger
from tandem.errors import HandshakeMismatch, InvalidRequest, Unavailable
from tandem.types import Incarnation, WorkerId, WorkerInfo, WorkerLoad

_TICKS_PER_LEASE = 20
_LONGEST_TICK_S = 0.25
_MOST_HEARTBEATS_PER_S = 1000
"""Heartbeats that a router asks of all workers together as they register: about a fifth of a core."""

_REMEDY = "give router and workers the same --model; a changed config, tokenizer or template needs routers of its own"

_log = get_logger(__name__)

OpenLink: TypeAlias = Callable[[WorkerInfo, Callable[[], None]], WorkerLink]
"""Opens a link; the function given is to be called when its `connected` has changed."""


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
        *,
        falls_back: bool = False,
        pinned: str = "",
    ) -> None:
        """`falls_back`: whether decode workers compute every prompt as long as no prefill worker is ready.

        `pinned`: as `ServingSet` has it.
        """
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
        self._records: dict[WorkerId, WorkerRecord] = {}
        self._fleet = Fleet(falls_back=falls_back)
        self.serving = ServingSet(pinned)
        """Which set of equal workers gets new requests. To be read, as `seats`: the ready ones of each set."""
        self.seats: dict[SetId, int] = {}
        self._by_number: dict[int, WorkerRecord] = {}
        self._prefixes = PrefixIndex()
        self._handoff_times = HandoffTimes()
        self._ejections = Ejections()
        self._links: WeakSet[WorkerLink] = WeakSet()
        """Links, lost workers' included until their tasks have ended."""
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Workers:
        return self

    async def __aexit__(self, *_: object) -> None:
        links = tuple(self._links)
        for link in links:
            link.close()
        await asyncio.gather(*(link.wait_closed() for link in links))

    # --- what workers tell ---

    def register(self, info: WorkerInfo, owner: str = "") -> None:
        """Lets a worker in; a newer incarnation of a known name replaces the old at once.

        The one that was replaced stays out until the newer one is gone: else two processes that were given one name
        would replace each other for ever. `owner`: the identity whose token it brought; nobody else has the name
        until it is gone. Raises Unavailable for both, HandshakeMismatch that names the field in which it differs from
        this router, and InvalidRequest for an info that lacks something.
        """
        check_complete(info)
        for name, ours in self._expected.items():
            if getattr(info, name) != ours:
                raise HandshakeMismatch(name, ours, f"{getattr(info, name)}; {_REMEDY}")
        known = self._records.get(info.worker_id)
        replaced: tuple[Incarnation, ...] = ()
        if known is not None:
            known.check_claim(info, owner)
            if known.info.incarnation == info.incarnation:
                known.heard_s = self._clock.now_s()
                return
            replaced = (*known.replaced, known.info.incarnation)
            self._remove(known, f"worker {info.worker_id} has restarted")
        record = self._records[info.worker_id] = WorkerRecord(info, self._clock.now_s(), owner, replaced)
        record.number = self._fleet.add(info, record.room)
        self._by_number[record.number] = record
        self._open(record)
        self._choose_set()

    def heartbeat(self, info: WorkerInfo, load: WorkerLoad, owner: str = "") -> None:
        """Renews the lease, or registers a worker again that was removed for its silence. Raises as `register`."""
        self._forgive_standstill()
        self.register(info, owner)
        record = self._records[info.worker_id]
        record.take_load(load, self._clock.now_s())
        self._judge_engine(record)
        self._look_at(record)

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
        self._look_at(record)
        return record.info

    @property
    def heartbeat_s(self) -> float:
        """Shortest time between heartbeats to ask of a worker that registers now."""
        return len(self._records) / _MOST_HEARTBEATS_PER_S

    def drain_ordered(self, info: WorkerInfo) -> bool:
        """Whether this life of the worker was told to drain."""
        record = self._current(info)
        return record is not None and record.drain_ordered

    def tick(self) -> None:
        """Ends leases that ran out, judges engines, and lets another set serve when its time has come."""
        self._forgive_standstill()
        now_s = self._clock.now_s()
        for record in list(self._records.values()):
            if now_s - record.heard_s > self.lease_s:
                self._remove(record, f"worker {record.info.worker_id} was silent for {self.lease_s:g} s")
            else:
                self._judge_engine(record)
        self._choose_set()

    # --- what requests ask ---

    def link(self, info: WorkerInfo) -> WorkerLink | None:
        """The stream to this life of a worker; None if it is gone."""
        record = self._current(info)
        return None if record is None else record.link

    def views(self) -> list[WorkerView]:
        """All workers, as placement sees them."""
        now_s = self._clock.now_s()
        return [record.view(now_s, self._ejections) for record in self._records.values()]

    @property
    def num_pairs_set_aside(self) -> int:
        """Number of pairs that placement takes last."""
        return len(self._ejections.pair_burdens(self._clock.now_s()))

    def readiness(self) -> str | None:
        """Returns what is missing to serve a request, now or once another set has taken over; None = nothing is."""
        return None if self.serving.is_overtaken else readiness_of(self.candidates(), self.serving.wanted)

    def serve_only_without(self, set_id: SetId) -> bool:
        """Whether sets of workers are ready, and this set is not."""
        return not self.seats.get(set_id) and any(self.seats.values())

    def candidates(self, prefix: Prefix | None = None) -> Candidates:
        """What the next placement, of a request that begins with `prefix`, is made from; until anything changes."""
        now_s = self._clock.now_s()
        held = self._prefixes.held(prefix or Prefix("", ()), self._fleet.block_sizes(), now_s)

        def view(number: int) -> WorkerView:
            return self._by_number[number].view(now_s, self._ejections, prefix)

        return Candidates(self._fleet, view, held, self._ejections.burdens(now_s))

    async def place(self, demand: Demand, wait_s: float) -> Assignment:
        """A pair for `demand`, counted as its workers' load until `end`; waits at most `wait_s` for one.

        Raises Unavailable.
        """
        if demand.prefix is not None and self._prefixes.num_telling:
            for block_size in self._fleet.block_sizes():
                await demand.prefix.name_blocks(block_size)
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    changed = self._changed
                    try:
                        return self.place_now(demand)
                    except Unavailable:
                        await changed.wait()
        except TimeoutError:
            return self.place_now(demand)

    def place_now(self, demand: Demand) -> Assignment:
        """As `place`, for who does not wait; the blocks of the demand's prefix are named."""
        now_s = self._clock.now_s()
        if demand.source is None:
            set_id = demand.set_id or self.serving.wanted
            demand = replace(demand, set_id=set_id, handoff_s=self._handoff_times.expected_s(demand.num_tokens))
        placement = place(demand, self.candidates(demand.prefix), self._rng, self._ejections.pair_burdens(now_s))
        chosen = [
            (record, record.view(now_s, self._ejections, demand.prefix))
            for record in (self._records[info.worker_id] for info in (placement.prefill, placement.decode) if info)
        ]
        decode, view = chosen[-1]
        num_tokens = view.lacking_tokens(demand)
        if placement.prefill is not None:
            decode.coming_tokens += num_tokens
            decode.coming_seqs += demand.num_choices
        for record, view in chosen:
            record.assigned_tokens += view.lacking_tokens(demand)
            record.assigned_seqs += demand.num_choices
            if demand.prefix is not None:
                record.expect(demand.prefix, view.likely_tokens, now_s)
        if demand.source is None:
            computing, view = chosen[0]
            computing.assigned_prompt_tokens += view.lacking_tokens(demand)
        assignment = Assignment(placement, num_tokens, demand.num_choices, self._ejections.new_probe())
        self._ejections.begin(assignment.subjects, assignment.probe, now_s)
        return assignment

    def arrive(self, assignment: Assignment) -> None:
        """The decode worker has the request: its next heartbeat shows it. To be called once."""
        self._leave(assignment, arrived=True)

    def end(self, assignment: Assignment, *, arrived: bool) -> None:
        """It no longer runs on that pair. `arrived`: `arrive` was called, or decode had it from the start."""
        if not arrived:
            self._leave(assignment, arrived=False)
        elif (record := self._current(assignment.placement.decode)) is not None:
            record.ended_seqs += assignment.num_seqs
        self._ejections.end(assignment.subjects, assignment.probe)

    def handed_off(self, assignment: Assignment, seconds: float) -> None:
        """Its hand-off was good, and took so long; the prefill worker has done its part."""
        placement = assignment.placement
        assert placement.prefill is not None
        prefill, decode = placement.prefill, placement.decode
        self._handoff_times.took(assignment.num_tokens, seconds)
        self._ejections.handed_off(prefill.incarnation, decode.incarnation)
        for subject in (prefill.incarnation, (prefill.incarnation, decode.incarnation)):
            self._succeeded(subject)

    def decoded(self, decode: WorkerInfo) -> None:
        """Notes that the decode worker made tokens of a request."""
        self._succeeded(decode.incarnation)

    def failed(self, worker: WorkerInfo) -> None:
        """A request failed by this worker's own fault."""
        if self._current(worker) is not None:
            self._failed(worker.incarnation)

    def handoff_failed(self, prefill: WorkerInfo, decode: WorkerInfo) -> None:
        """A hand-off between these two failed. If one of them is gone, that was why."""
        if self._current(prefill) is None or self._current(decode) is None:
            return
        for subject in self._ejections.blamed_for_handoff(prefill.incarnation, decode.incarnation):
            self._failed(subject)

    async def wait_for_change(self, at_most_s: float) -> None:
        """Returns when there are other workers, or others take new work, or when the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._changed.wait()

    def _leave(self, assignment: Assignment, *, arrived: bool) -> None:
        record = self._current(assignment.placement.decode)
        if record is None:
            return
        record.coming_tokens -= assignment.num_tokens
        record.coming_seqs -= assignment.num_seqs
        if not arrived:
            record.assigned_tokens -= assignment.num_tokens
            record.assigned_seqs -= assignment.num_seqs

    def _failed(self, subject: Subject) -> None:
        backoff_s = self._ejections.failed(subject, self._clock.now_s())
        if backoff_s is not None:
            _log.warning("set aside, for requests failed there", workers=self._names(subject), seconds=backoff_s)

    def _succeeded(self, subject: Subject) -> None:
        if self._ejections.succeeded(subject):
            _log.info("no longer set aside", workers=self._names(subject))

    def _names(self, subject: Subject) -> str:
        incarnations = subject if isinstance(subject, tuple) else (subject,)
        names = {record.info.incarnation: record.info.worker_id for record in self._records.values()}
        return ", ".join(names.get(each, each) for each in incarnations)

    def _forgive_standstill(self) -> None:
        now_s = self._clock.now_s()
        late_s = now_s - self._awake_s - self.tick_s
        self._awake_s = now_s
        if late_s > 0:
            for record in self._records.values():
                record.forgive(late_s, now_s)

    def _judge_engine(self, record: WorkerRecord) -> None:
        """A live loop with a dead engine still sends heartbeats; only its step count tells."""
        has_work = record.load is not None and record.load.running_seqs > 0
        stalled = has_work and self._clock.now_s() - record.moved_s > self._stall_s
        if stalled and record.link is not None:
            self._close(record, f"worker {record.info.worker_id} made no step for {self._stall_s:g} s")
        elif not stalled and record.link is None:
            self._open(record)

    def _open(self, record: WorkerRecord) -> None:
        info = record.info
        _log.info("worker joined", worker_id=info.worker_id, role=info.role, address=info.address)
        record.link = self._open_link(info, partial(self._look_at, record))
        record.link.held.join(self._prefixes, record.number)
        self._links.add(record.link)
        self._look_at(record)

    def _close(self, record: WorkerRecord, why: str) -> None:
        """Closes the link, if any; its requests are notified."""
        if record.link is None:
            return
        _log.warning("worker lost", worker_id=record.info.worker_id, role=record.info.role, why=why)
        record.link.close()
        record.link.held.leave()
        record.link = None
        self._look_at(record)

    def _remove(self, record: WorkerRecord, why: str) -> None:
        self._close(record, why)
        del self._records[record.info.worker_id], self._by_number[record.number]
        self._fleet.remove(record.info)
        self._ejections.forget(record.info.incarnation)
        self._choose_set()
        self._notify()

    def _look_at(self, record: WorkerRecord) -> None:
        """Whether it takes new work may have changed, and how much it holds may be known now."""
        if self._by_number.get(record.number) is not record:
            return  # its link outlived it
        if self._fleet.change(record.number, record.room, usable=record.obstacle() is None):
            self._choose_set()
            self._notify()

    def _choose_set(self) -> None:
        """Settles which set serves, as things are now; logs what begins to serve and what is set apart."""
        before, self.seats = self.serving.apart, ready_seats(self.candidates())
        if self.serving.choose(self.seats, self._clock.now_s()):
            _log.info("another set of workers serves", set_id=self.serving.current)
            self._notify()
        for record in self._records.values() if before or self.serving.apart else ():
            why = self.serving.why_apart(SetId.of(record.info))
            if why and not record.set_apart:
                _log.warning("worker set apart", worker_id=record.info.worker_id, why=why)
            record.set_apart = bool(why)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _current(self, info: WorkerInfo) -> WorkerRecord | None:
        record = self._records.get(info.worker_id)
        return record if record is not None and record.info.incarnation == info.incarnation else None
