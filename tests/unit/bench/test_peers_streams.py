import asyncio
import time

import pytest

from bench.peers.burst import Burst, BurstShape, measure_burst
from bench.support.http_streams import chunks, events
from bench.support.streams import Arrivals, MissingTokens, OnFirst, Prompt, Stream


def test_gaps_that_reach_into_a_window_count() -> None:
    stream = Stream(0.0, ((1.0, 1), (2.0, 1), (4.0, 2), (5.0, 1)))
    assert stream.gaps_s() == [1.0, 2.0, 1.0]
    assert stream.gaps_s(3.0, 3.5) == [2.0]
    assert (stream.ttft_s, stream.end_s, stream.num_tokens) == (1.0, 5.0, 5)


def test_arrivals_tell_of_the_first_token_once_and_refuse_a_short_stream() -> None:
    told: list[int] = []
    arrivals = Arrivals(lambda: told.append(1))
    for token_ids in ((), (7, 8), (9,)):
        arrivals.add(token_ids)
    assert told == [1]
    assert len(arrivals.stream(3).arrivals) == 2
    assert arrivals.stream(3).token_ids == (7, 8, 9)
    with pytest.raises(MissingTokens, match="after 3 of 4 tokens"):
        arrivals.stream(4)


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_events_are_found_however_the_body_is_cut(size: int) -> None:
    body = b'data: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'
    reader = asyncio.StreamReader()
    for start in range(0, len(body), size):
        part = body[start : start + size]
        reader.feed_data(f"{len(part):x};ext\r\n".encode() + part + b"\r\n")
    reader.feed_data(b"0\r\n\r\n")
    assert [event async for event in events(chunks(reader))] == [b'{"a": 1}', b'{"b": 2}']


class FakeClient:
    """Answers at once; gaps are 10 ms, 40 ms if a long prompt came before the stream was asked for."""

    def __init__(self, shape: BurstShape) -> None:
        self.shape = shape
        self.long_prompts = 0
        self.burst_came = asyncio.Event()

    async def generate(self, prompt: Prompt, max_tokens: int, on_first: OnFirst | None = None) -> Stream:
        sent_s = time.perf_counter()
        if on_first is not None:
            on_first()
            await self.burst_came.wait()
        self.long_prompts += len(prompt) == self.shape.burst_prompt_tokens
        if self.long_prompts == self.shape.burst_prompts:
            self.burst_came.set()
        gap_s = 0.04 if self.long_prompts else 0.01
        return Stream(sent_s, tuple((sent_s + (1 + index) * gap_s, 1) for index in range(max_tokens)))


async def test_interference_sets_gaps_in_the_burst_against_quiet_ones() -> None:
    shape = BurstShape(burst_after_s=0.0, burst_spacing_s=0.0)
    into = Burst()
    await measure_burst(FakeClient(shape), shape, 100, 1, into)
    assert len(into.burst_ttft_s) == shape.burst_prompts
    document = into.document()
    assert document["quiet_ms"]["p99"] == pytest.approx(10)
    assert document["p99_ratio"] == pytest.approx(4)
    assert document["ttft_ms"]["max"] == pytest.approx(40)
