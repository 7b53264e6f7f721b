"""Starts requests and owns them while they run: what servicers call.

A request lives inside `async with pipeline.start(request)`: leaving it, for whatever reason,
ends the request and releases all it holds before the block is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.admission import Admission
from router.choice import Choice
from router.generation import Generation, Patience
from router.outbox import Outbox
from router.request import GenerationRequest
from router.timeline import Timeline
from router.tokenization import Tokenization
from router.workers import Workers
from tandem.clock import Clock
from tandem.errors import Reason, Unavailable
from tandem.telemetry.observers import RouterObserver


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

    def check_open(self, priority: int) -> None:
        """For before the work of tokenizing. Raises Unavailable when draining, Overloaded when full."""
        if self.draining:
            raise Unavailable("the router is draining", Reason.DRAINING)
        self._admission.queue.check_room(priority)

    @asynccontextmanager
    async def start(self, request: GenerationRequest, timeline: Timeline) -> AsyncIterator[Outbox]:
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
            yield generation.outbox
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            generation.abandon()  # a task that was cancelled before its first step has told nobody
