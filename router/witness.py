"""What one request shows of the workers that it runs on, told to `Workers`; one pair at a time.

    begin ──handed over, or there from the start──▶ arrived ──token, or the end──▶ decoded ──▶ end
       └────────────────────────────────────────────────┴──failed──▶ end

A worker is blamed for a step that broke only once the request went well elsewhere: a request that breaks on every
worker is at fault itself, and must not set a whole cluster aside.
"""

from __future__ import annotations

from router.assignment import Assignment
from router.placement import Placement
from router.workers import Workers
from shell.telemetry.observers import RequestObserver
from tandem.errors import InternalError, Reason, TandemError, TransferError
from tandem.types import WorkerInfo


class Witness(RequestObserver):
    """Call `begin` and `end` for each pair; the rest it hears as other observers do."""

    __slots__ = ("_arrived", "_assignment", "_decoded", "_source", "_suspects", "_workers")

    def __init__(self, workers: Workers) -> None:
        super().__init__()
        self._workers = workers
        self._assignment: Assignment | None = None
        self._source: Assignment | None = None
        """Where it runs until it is handed over from there."""
        self._arrived = False
        """Whether the decode worker has the prompt's KV, or is to compute it."""
        self._decoded = False
        self._suspects: list[WorkerInfo] = []
        """Where it broke."""

    def begin(self, assignment: Assignment) -> None:
        """It is about to run there."""
        self._assignment = assignment
        self._arrived = assignment.placement.prefill is None
        self._decoded = False

    def take_over(self, assignment: Assignment) -> None:
        """It is about to be handed over from where it runs."""
        self._source = self._assignment
        self.begin(assignment)

    def go_back(self) -> None:
        """It runs on where it did."""
        source, self._source = self._source, None
        self.end()
        self._assignment, self._arrived, self._decoded = source, True, True

    def handed_over(self, num_bytes: int, seconds: float) -> None:
        """The decode worker has it."""
        if self._assignment is None or self._arrived:
            return
        self._arrived = True
        if self._source is not None:
            self._workers.end(self._source, arrived=True)
            self._source = None
        self._workers.arrive(self._assignment)
        if self._assignment.placement.prefill is not None:
            self._workers.handed_over(self._assignment, seconds)

    def tokens(self, num_tokens: int, index: int = 0) -> None:
        """New ones. Those after the hand-off are from the decode worker."""
        if self._arrived and not self._decoded:
            self._decode_went_well()

    def finished(self) -> None:
        """Nothing is left to be done."""
        if self._arrived and not self._decoded:
            self._decode_went_well()
        self._accuse()

    def failed(self, culprit: WorkerInfo, error: TandemError) -> None:
        """The pair failed by `culprit`, or, of a hand-off, nobody knows by whom."""
        if error.reason is Reason.DRAINING:
            return  # it is well, and says so
        placement = self._placement
        if isinstance(error, InternalError):
            self._suspects.append(culprit)
        elif isinstance(error, TransferError) and placement.prefill is not None:
            self._workers.handoff_failed(placement.prefill, placement.decode)
        else:
            self._workers.failed(culprit)

    def end(self) -> None:
        """It no longer runs there. Idempotent."""
        if self._source is not None:
            self._workers.end(self._source, arrived=True)
            self._source = None
        if self._assignment is not None:
            self._workers.end(self._assignment, arrived=self._arrived)
        self._assignment, self._arrived = None, False

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
