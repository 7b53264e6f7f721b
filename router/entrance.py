"""The one way in for requests of every service: judged, resolved, and run while the caller stays.

A servicer turns what its client said into a GenerateRequest and gives it here, so that checks,
limits, defaults, admission and times are the same through every door. Knows no other protocol.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from router.intake import Intake
from router.outbox import Outbox
from router.pipeline import Pipeline
from router.timeline import Timeline
from tandem.clock import Clock
from tandem.errors import TandemError
from tandem.telemetry.observers import RouterObserver
from tandem.telemetry.trace_context import current_trace, trace_from_metadata
from tandem.types import RequestId
from tandem.v1 import inference_pb2

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """One request under way, and where its tokens come out."""

    request_id: RequestId
    num_prompt_tokens: int
    outbox: Outbox
    cancel: Callable[[TandemError], None]
    """Ends it at once, though its caller does not read; the outbox then ends with the error."""


class Entrance:
    """Shared by all servicers that generate."""

    def __init__(self, intake: Intake, pipeline: Pipeline, clock: Clock, observer: RouterObserver) -> None:
        self._intake = intake
        self._pipeline = pipeline
        self._clock = clock
        self._observer = observer

    @contextmanager
    def judging(self) -> Iterator[None]:
        """For what a servicer refuses before `run`: watchers hear of it as of every refusal."""
        try:
            yield
        except TandemError as error:
            self._observer.refused(error)
            raise

    @asynccontextmanager
    async def run(
        self, message: inference_pb2.GenerateRequest, context: Context, *, timeout_s: float | None = None
    ) -> AsyncIterator[RunningRequest]:
        """Runs the request while inside; leaving releases all it holds. `timeout_s`: sooner than the call's deadline.

        Raises InvalidRequest, UnsupportedOption, ModelNotFound, Overloaded, Unavailable before anything runs;
        what fails later comes by the outbox.
        """
        timeline = Timeline(self._clock)
        deadline = self._pipeline.deadline(context.time_remaining(), timeout_s)
        with self.judging(), self._pipeline.reading(message.priority):
            resolved = await self._intake.read(message, deadline, *_trace_of(context))
        async with self._pipeline.start(resolved, timeline) as running:
            yield RunningRequest(resolved.request_id, len(resolved.prompt), running.outbox, running.cancel)


def _trace_of(context: Context) -> tuple[str, str]:
    return current_trace() or trace_from_metadata(tuple(context.invocation_metadata() or ()))
