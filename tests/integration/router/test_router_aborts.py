"""VllmEngine's Abort where no answer tells of it: the caller does not read, or its prompt is still being read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from models.files.checkpoint import read_checkpoint
from router.admission import Admission
from router.delivery import Unread
from router.entrance import Entrance
from router.faces.vllm.servicer import VllmServicer
from router.generation import Rooms
from router.metrics import RouterMetrics
from router.request_spans import RequestSpans
from router.retries import RetryPolicy
from shell.clock import MonotonicClock
from shell.telemetry.events import ProcessEvents
from shell.telemetry.metric import Process
from shell.telemetry.metrics import Metrics
from tandem.foreign import vllm_engine_pb2 as vllm

PROMPT = "Hi"
PROMPT_IDS = (72, 105)


class Call:
    """One call's context, and the client at its other end."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.answers: list[Any] = []

    async def write(self, answer: Any) -> None:
        self.answers.append(answer)
        await self.reads.wait()

    def time_remaining(self) -> None:
        """It has no deadline."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return ""


class Tokenizing:
    """The router's tokenization, which a test may hold up."""

    def __init__(self, tokenization: Any) -> None:
        self._tokenization = tokenization
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.has_begun = asyncio.Event()

    def detokenizer(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenization.detokenizer(*args, **kwargs)

    async def encode_text(self, *args: Any, **options: Any) -> Any:
        self.has_begun.set()
        await self.goes_on.wait()
        return await self._tokenization.encode_text(*args, **options)


@pytest.fixture
def tokenizing(cluster: Any) -> Tokenizing:
    return Tokenizing(cluster.router.tokenization)


@pytest.fixture
def engine(cluster: Any, tokenizing: Any) -> VllmServicer:
    """The servicer itself, over the rooms of the running router."""
    router = cluster.router
    checkpoint, config = read_checkpoint(router.config.model), router.config
    clock = MonotonicClock()
    admission = Admission(router.queue, clock)
    counts = RouterMetrics(Metrics(Process.ROUTER, "demo"), router.recent, clock)
    rooms = Rooms(router.workers, admission, clock, RetryPolicy(), counts, RequestSpans(None, "demo"), ProcessEvents())
    unread = Unread(clock, config.max_unread_bytes, config.max_unread_s)
    entrance = Entrance(checkpoint, tokenizing, config.limits, rooms, unread)
    return VllmServicer(checkpoint, config, entrance, router.status)


def generate(engine: VllmServicer, call: Any, request_id: str = "a") -> asyncio.Task[None]:
    sampling = vllm.SamplingParams(max_tokens=8, temperature=0.0)
    request = vllm.GenerateRequest(request_id=request_id, text=PROMPT, stream=True, sampling_params=sampling)
    return asyncio.create_task(engine.Generate(request, call))


async def abort(engine: VllmServicer, *request_ids: str) -> None:
    context: Any = None
    await engine.Abort(vllm.AbortRequest(request_ids=request_ids), context)


async def test_an_abort_frees_the_workers_of_a_request_whose_caller_does_not_read(
    cluster: Any, engine: VllmServicer
) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    call = Call()
    generating = generate(engine, call)
    await cluster.until(lambda: call.answers)

    await abort(engine, "a")

    await cluster.until(lambda: cluster.idle)
    assert not generating.done()
    call.reads.set()
    await generating
    complete = call.answers[-1].complete
    assert (complete.finish_reason, list(complete.output_ids)) == ("abort", cluster.completion(PROMPT_IDS, 1))


async def test_an_abort_counts_while_the_prompt_is_still_being_tokenized(
    cluster: Any, engine: VllmServicer, tokenizing: Tokenizing
) -> None:
    workers = await cluster.add_pair()
    tokenizing.goes_on.clear()
    call = Call()
    call.reads.set()
    generating = generate(engine, call)
    await tokenizing.has_begun.wait()

    await abort(engine, "a")
    tokenizing.goes_on.set()
    await generating

    (answer,) = call.answers
    assert (answer.complete.finish_reason, list(answer.complete.output_ids)) == ("abort", [])
    assert not any(worker.specs for worker in workers)


async def test_an_abort_of_no_id_ends_nobody(cluster: Any, engine: VllmServicer) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    call = Call()
    call.reads.set()
    generating = generate(engine, call, request_id="")
    await cluster.until(lambda: call.answers)

    await abort(engine, "")
    decode.let_go()
    await generating

    assert call.answers[-1].complete.finish_reason == "length"


async def test_an_abort_ends_every_request_of_its_id(cluster: Any, engine: VllmServicer) -> None:
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    calls = [Call(), Call()]
    generating = [generate(engine, call) for call in calls]
    await cluster.until(lambda: all(call.answers for call in calls))

    await abort(engine, "a")

    await cluster.until(lambda: cluster.idle)
    for call, task in zip(calls, generating, strict=True):
        call.reads.set()
        await task
        assert call.answers[-1].complete.finish_reason == "abort"
