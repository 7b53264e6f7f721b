"""What one request shows of the workers that it runs on, passed to `Workers`; one pair at a time.

    begin ──KV arrived, or there from the start──▶ arrived ──token, or the end──▶ decoded ──▶ end
       └────────────────────────────────────────────────┴──failed──▶ end

A worker is blamed for a step that broke only once the request went well elsewhere: a request that breaks on every
worker is at fault itself, and must not set a whole cluster aside.
"""

from __future__ import annotations

from router.assignment import Assignment
from router.placement import Placement
from router.workers import Workers
from shell.telemetry.events import KvArrived, RequestEvent, TokensArrived
from tandem.errors import InternalError, Reason, TandemError, TransferError
from tandem.types import WorkerInfo


class Witness:
    """Call `begin` and `end` for each pair; `hear` listens to the request."""

    __slots__ = ("_arrived", "_assignment", "_decoded", "_source", "_suspects", "_workers")

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._assignment: Assignment | None = None
        self._source: Assignment | None = None
        """The pair that the request leaves in a move."""
        self._arrived = False
        """Whether the decode worker has the prompt's KV, or is to compute it."""
        self._decoded = False
        self._suspects: list[WorkerInfo] = []
        """Workers on which a step of the request broke."""

    def begin(self, assignment: Assignment) -> None:
        """The request is about to run there."""
        self._assignment = assignment
        self._arrived = assignment.placement.prefill is None
        self._decoded = False

    def move(self, assignment: Assignment) -> None:
        """Notes that the request is about to move to another pair."""
        self._source = self._assignment
        self.begin(assignment)

    def move_failed(self) -> None:
        """Notes that the move failed: the request stays on the pair before."""
        source, self._source = self._source, None
        self.end()
        self._assignment, self._arrived, self._decoded = source, True, True

    def hear(self, event: RequestEvent) -> None:
        """A listener of the request. Tokens after the transfer are from the decode worker."""
        if isinstance(event, TokensArrived):
            if self._arrived and not self._decoded:
                self._decode_went_well()
        elif isinstance(event, KvArrived):
            self._kv_arrived(event.seconds)

    def finished(self) -> None:
        """Notes that the request has all that was asked for."""
        if self._arrived and not self._decoded:
            self._decode_went_well()
        self._accuse()

    def failed(self, culprit: WorkerInfo, error: TandemError) -> None:
        """The pair failed by `culprit`, or, of a hand-off, nobody knows by whom."""
        if error.reason is Reason.DRAINING:
            return  # the worker is well, and says so
        placement = self._placement
        if isinstance(error, InternalError):
            self._suspects.append(culprit)
        elif isinstance(error, TransferError) and placement.prefill is not None:
            self._workers.handoff_failed(placement.prefill, placement.decode)
        else:
            self._workers.failed(culprit)

    def end(self) -> None:
        """The request no longer runs there. Idempotent."""
        if self._source is not None:
            self._workers.end(self._source, arrived=True)
            self._source = None
        if self._assignment is not None:
            self._workers.end(self._assignment, arrived=self._arrived)
        self._assignment, self._arrived = None, False

    def _kv_arrived(self, seconds: float) -> None:
        if self._assignment is None or self._arrived:
            return
        self._arrived = True
        if self._source is not None:
            self._workers.end(self._source, arrived=True)
            self._source = None
        self._workers.arrive(self._assignment)
        if self._assignment.placement.prefill is not None:
            self._workers.handed_off(self._assignment, seconds)

    @property
    def _placement(self) -> Placement:
        assert self._assignment is not None
        return self._assignment.placement

    def _decode_went_well(self) -> None:
        self._decoded = True
        self._accuse()
        self._workers.decoded(self._placement.decode)

    def _accuse(self) -> None:
        for each in self._suspects:
            self._workers.failed(each)
        self._suspects.clear()
