"""Starts requests and owns them while they run: what servicers call.

A request lives inside `async with pipeline.start(request)`: leaving it, for whatever reason,
ends the request and releases all it holds before the block is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from router.admission import Admission
from router.choice import Choice
from router.generation import Generation, Patience
from router.outbox import Outbox
from router.request import GenerationRequest
from router.timeline import Timeline
from router.tokenization import Tokenization
from router.workers import Workers
from tandem.clock import Clock, Deadline
from tandem.errors import Reason, TandemError, Unavailable
from tandem.telemetry.observers import RouterObserver


@dataclass(frozen=True, slots=True)
class Running:
    """One request under way."""

    outbox: Outbox
    task: asyncio.Task[None]

    def cancel(self, error: TandemError) -> None:
        """Ends it at once, whether or not its outbox is being read; there, `error` is the end."""
        self.outbox.fail(error)
        self.task.cancel()


class Pipeline:
    """Shared by all requests of a router."""

    def __init__(
        self,
        workers: Workers,
        admission: Admission,
        tokenization: Tokenization,
        clock: Clock,
        patience: Patience,
        observer: RouterObserver,
    ) -> None:
        self._workers = workers
        self._admission = admission
        self._tokenization = tokenization
        self._clock = clock
        self._patience = patience
        self._observer = observer
        self._draining = asyncio.Event()
        self._num_reading = 0

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining.is_set()

    def begin_drain(self) -> None:
        """Refuses new requests from now on; those under way go on."""
        self._draining.set()

    async def wait_for_drain(self) -> None:
        """Returns once new requests are refused."""
        await self._draining.wait()

    def deadline(self, *seconds: float | None) -> Deadline:
        """Of a request that arrives now and may take so long: the least of them, and the router's own patience."""
        given = [each for each in seconds if each is not None]
        return Deadline.after(self._clock, min([self._patience.total_s, *given]))

    @contextmanager
    def reading(self, priority: int) -> Iterator[None]:
        """For the work of tokenizing, which is not begun for more requests than could then run or wait.

        Raises Unavailable when draining, Overloaded when full.
        """
        if self.draining:
            raise Unavailable("the router is draining", Reason.DRAINING)
        self._admission.queue.check_room(priority, self._num_reading)
        self._num_reading += 1
        try:
            yield
        finally:
            self._num_reading -= 1

    @asynccontextmanager
    async def start(self, request: GenerationRequest, timeline: Timeline) -> AsyncIterator[Running]:
        """Runs the request while inside. All errors come by the outbox."""
        detokenizer = self._tokenization.detokenizer(skip_special_tokens=request.text.skip_special_tokens)
        generation = Generation(
            request,
            Choice(detokenizer, request.text),
            self._workers,
            self._admission,
            self._clock,
            self._patience,
            timeline,
            self._observer,
        )
        task = asyncio.create_task(generation.drive(), name=f"request {request.request_id}")
        try:
            yield Running(generation.outbox, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            generation.abandon()  # a task that was cancelled before its first step has told nobody
