"""Load on a running server, measured from the client's side with asyncio.

Open loop: each request is sent at its scheduled time, and its latencies count from there, so that
a server which falls behind cannot hide it (no coordinated omission). Closed loop: a fixed number
of callers, latencies count from sending.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing

import uvloop

from cli.load.report import LoadReport, Sample
from cli.load.workload import LoadOptions, PlannedRequest, plan, warm_up
from shell.clock import Clock, MonotonicClock
from shell.config import ClientSecurityConfig
from shell.progress import Step, steps
from tandem.client import AsyncClient
from tandem.errors import TandemError


def run(
    target: str, options: LoadOptions, timeout_s: float, security: ClientSecurityConfig | None = None
) -> LoadReport:
    """Runs one load test against the router at `target`. Raises TandemError if it cannot be reached."""

    async def main() -> LoadReport:
        async with AsyncClient(target, security=security) as client:
            return await measure(client, options, timeout_s, MonotonicClock())

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def measure(client: AsyncClient, options: LoadOptions, timeout_s: float, clock: Clock) -> LoadReport:
    """One load test through `client`; a request that fails is counted, not raised."""
    model = await client.model()
    planned = plan(options, model.vocab_size, model.context_tokens, model.eos_token_ids)
    before = warm_up(options, planned)
    with steps("requests", len(before) + len(planned)) as answered:
        load = _Load(client, clock, timeout_s, options.temperature, answered)
        for request in before:
            await load.send(request)
        load.samples.clear()
        started_s = clock.now_s()
        if options.concurrency is None:
            await load.open_loop(planned)
        else:
            await load.closed_loop(planned, options.concurrency)
        return LoadReport(options, model.model, clock.now_s() - started_s, tuple(load.samples))


class _Load:
    """A run: what is sent, and what was seen."""

    def __init__(self, client: AsyncClient, clock: Clock, timeout_s: float, temperature: float, answered: Step) -> None:
        self.samples: list[Sample] = []
        self._answered = answered
        self._client = client
        self._clock = clock
        self._timeout_s = timeout_s
        self._temperature = temperature

    async def open_loop(self, planned: Sequence[PlannedRequest]) -> None:
        """Sends each request at its time, whatever became of earlier requests."""
        begin_s = self._clock.now_s()
        async with asyncio.TaskGroup() as tasks:
            for request in planned:
                due_s = begin_s + request.at_s
                await asyncio.sleep(max(0.0, due_s - self._clock.now_s()))
                tasks.create_task(self.send(request, due_s))

    async def closed_loop(self, planned: Sequence[PlannedRequest], concurrency: int) -> None:
        """Runs `concurrency` callers, who take requests off a common list."""
        left = deque(planned)

        async def caller() -> None:
            while left:
                await self.send(left.popleft())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(caller())

    async def send(self, request: PlannedRequest, due_s: float | None = None) -> None:
        """Sends one request and records it; latencies count from `due_s`, or else from now."""
        begin_s = self._clock.now_s() if due_s is None else due_s
        arrivals: list[tuple[float, int]] = []
        error = ""
        updates = self._client.generate(
            token_ids=request.token_ids,
            max_tokens=request.max_tokens,
            temperature=self._temperature,
            seed=request.seed,
            ignore_eos=True,
            timeout_s=self._timeout_s,
        )
        try:
            async with aclosing(updates):
                async for update in updates:
                    if update.token_ids:
                        arrivals.append((self._clock.now_s() - begin_s, len(update.token_ids)))
        except TandemError as failure:
            error = failure.reason.value
        self.samples.append(
            Sample(
                at_s=request.at_s,
                prompt_tokens=len(request.token_ids),
                arrivals=tuple(arrivals),
                e2e_s=self._clock.now_s() - begin_s,
                error=error,
            )
        )
        self._answered()
