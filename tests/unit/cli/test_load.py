import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from cli.load.run import measure
from cli.load.workload import LoadOptions
from shell.clock import MonotonicClock
from tandem.client import GenerationUpdate, ServedModel
from tandem.errors import Overloaded
from tandem.types import TokenId
from tests.manual_clock import ManualClock

CLOSED = LoadOptions(rate_per_s=None, concurrency=3, num_requests=9, num_warmup=1, output_tokens=4)
OPEN = LoadOptions(rate_per_s=1e6, concurrency=None, num_requests=9, num_warmup=0, output_tokens=4)


class FakeClient:
    """Answers each request with its tokens one by one, 10 ms apart on its clock; refuses every `refuse`-th."""

    def __init__(self, clock: ManualClock, refuse: int = 0) -> None:
        self._clock = clock
        self._refuse = refuse
        self.num_asked = 0
        self.temperatures: set[float] = set()
        self.num_running = 0
        self.most_running = 0

    async def model(self) -> ServedModel:
        return ServedModel("demo", "llama", 20, 512, frozenset({TokenId(0)}), False, 1, 1, 1, 1, 1)

    async def generate(self, *, max_tokens: int, **options: Any) -> AsyncGenerator[GenerationUpdate, None]:
        assert options["ignore_eos"]
        self.temperatures.add(options["temperature"])
        self.num_asked += 1
        if self._refuse and self.num_asked % self._refuse == 0:
            raise Overloaded("full")
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        for _ in range(max_tokens):
            await asyncio.sleep(0)
            self._clock.advance_s(0.01)
            yield GenerationUpdate("r", 0, "x", (TokenId(1),), (), None, None, None, None)
        self.num_running -= 1


async def measured(client: Any, options: LoadOptions, clock: Any) -> Any:
    return await measure(client, options, 5.0, clock)


async def test_a_closed_loop_keeps_its_callers_busy_and_no_more() -> None:
    clock = ManualClock()
    client = FakeClient(clock)
    report = await measured(client, replace(CLOSED, temperature=0.5), clock)
    assert client.temperatures == {0.5}
    assert client.most_running == 3
    assert client.num_asked == 10
    assert (len(report.samples), report.num_succeeded) == (9, 9)
    assert all(sample.num_tokens == 4 for sample in report.samples)


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    client = FakeClient(ManualClock())
    report = await measured(client, OPEN, MonotonicClock())
    assert client.most_running > 3
    assert report.num_succeeded == 9


async def test_lateness_of_the_sender_counts_as_latency() -> None:
    clock = ManualClock()
    client = FakeClient(clock)  # moves the clock far beyond the next arrivals before they are sent
    report = await measured(client, OPEN, clock)
    assert max(sample.ttft_s for sample in report.samples) > 0.02


async def test_refused_requests_are_counted_by_reason() -> None:
    clock = ManualClock()
    report = await measured(FakeClient(clock, refuse=5), CLOSED, clock)
    assert report.errors == {"QUEUE_FULL": 2}
    assert report.num_succeeded == 7
