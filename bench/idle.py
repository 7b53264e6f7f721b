"""How long the engine computes nothing between two steps, though there is work: `python -m bench.idle`.

A real decode worker in this process, without router and gRPC: it computes the prompts itself, then decodes
all sequences together. The event loop plans, applies and tells; the engine's thread computes. Idle is the
time from the end of one step to the begin of the next on the engine's thread, while every sequence decodes.

A step is what that thread is called for: `Runner.launch`, or `Runner.step` in checkouts from before two steps
could be in flight. The latter lays the step out and reads its tokens as well, which the loop does now: the
idle time of such a checkout comes out too small, never too large. With `--one-in-flight` no step
is launched before the one before it has been applied. For a CPU: on a GPU `launch` only queues a step.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import os
import random
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import uvloop

from decode_worker.policy import WorkerPolicy
from decode_worker.scheduler import StepLimits
from decode_worker.worker import new_decode_worker
from engine.loading import load_engine
from engine.runner import Runner
from engine.step import SampledToken
from kvtransfer.base import Fingerprints, PoolMemory
from kvtransfer.receiver import KvReceiver
from kvtransfer.transports import TCP
from models.files.checkpoint import read_checkpoint
from shell.clock import MonotonicClock
from shell.config import WorkerConfig
from simulator.outcomes import quantile
from tandem.errors import TandemError
from tandem.limits import Limits
from tandem.types import (
    FinishReason,
    Handle,
    Incarnation,
    RequestId,
    SamplingParams,
    TokenId,
    TokenLogprobs,
    WaitReason,
)
from tandem.validation import Validator
from worker.core import Worker
from worker.parts import WorkerParts
from worker.ports import RouterPort

NUM_SEQS = (1, 16, 64)
_WAIT_S = 300.0
_COMPUTING = ("launch", "step")
"""Methods of the runner that compute a step on the engine's thread; the first that is there."""
_FIRST_TOKEN_ID = 4
_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Idle:
    """At one number of sequences."""

    num_seqs: int
    num_gaps: int
    idle_p50_ms: float
    idle_p90_ms: float
    step_p50_ms: float
    cycle_p50_ms: float
    """From begin to begin."""
    idle_share: float
    """Of the time in which all sequences decoded."""


@dataclass(slots=True)
class StepTimes:
    """Begin and end of every step on the engine's thread."""

    spans_s: list[tuple[float, float]] = field(default_factory=list)

    def watch(self, runner: type[Runner]) -> None:
        """From now on every step of every runner of this class is noted."""
        name = next(each for each in _COMPUTING if hasattr(runner, each))
        compute: Callable[..., Any] = getattr(runner, name)

        def timed(*args: Any, **options: Any) -> Any:
            begin_s = time.perf_counter()
            result = compute(*args, **options)
            self.spans_s.append((begin_s, time.perf_counter()))
            return result

        setattr(runner, name, timed)

    def between(self, begin_s: float, end_s: float) -> list[tuple[float, float]]:
        """Steps that lie within."""
        return [span for span in self.spans_s if begin_s <= span[0] and span[1] <= end_s]


class Router(RouterPort):
    """What the worker tells its router: notes when all sequences have a token, and when the first one ends."""

    def __init__(self, num_seqs: int) -> None:
        self._num_seqs = num_seqs
        self._started: set[Handle] = set()
        self._ended: set[Handle] = set()
        self.all_started_s = float("inf")
        self.first_ended_s = float("inf")
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def reserved(self, handle: Handle, ticket: bytes = b"", kv_endpoint: bytes = b"", held_tokens: int = 0) -> None:
        """There is room for it."""

    def prefill_started(self, handle: Handle) -> None:
        """Does not come: the decode worker computes prompts."""

    def waiting(self, reason: WaitReason, handles: Sequence[Handle]) -> None:
        """All of it is under way."""

    def prefill_done(self, handle: Handle, *_: Any, **__: Any) -> None:
        """It has its first token, or is about to get it."""
        self._started.add(handle)
        if len(self._started) == self._num_seqs:
            self.all_started_s = time.perf_counter()

    def prompt_logprobs(self, handle: Handle, offset: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Nobody asks for them."""

    def leaving(self, handle: Handle) -> None:
        """Does not come: nothing drains."""

    def handoff_done(self, handle: Handle, num_bytes: int, seconds: float) -> None:
        """Does not come: nothing is handed over."""

    def token(
        self,
        handle: Handle,
        index: int,
        offset: int,
        token: SampledToken,
        finish_reason: FinishReason | None,
        score: float | None = None,
    ) -> None:
        """Notes the last one."""
        if finish_reason is not None:
            self._end(handle)

    def deltas(self, deltas: Iterable[tuple[Handle, Any]]) -> None:
        """In checkouts from before there was `token`: what one step made."""
        for handle, delta in deltas:
            if delta.finish_reason is not None:
                self._end(handle)

    def failed(self, handle: Handle, error: TandemError) -> None:
        """Ends the measurement."""
        if not self.done.done():
            self.done.set_exception(error)

    def _end(self, handle: Handle) -> None:
        if not self._ended:
            self.first_ended_s = time.perf_counter()
        self._ended.add(handle)
        if len(self._ended) == self._num_seqs:
            self.done.set_result(None)


@asynccontextmanager
async def open_worker(model: str, threads: int, max_seqs: int, policy: Mapping[str, Any]) -> AsyncIterator[Worker]:
    """A decode worker that runs until the block ends. The parts are put together as its `app` does.

    `policy`: of `WorkerPolicy`, beyond its caps.
    """
    checkpoint = read_checkpoint(model)
    config = WorkerConfig(model=model, max_seqs=max_seqs, threads=threads)
    engine = await asyncio.to_thread(load_engine, config)
    try:
        memory = PoolMemory(engine.kv_cache.host_rows, engine.kv_cache.shared_fd, Incarnation(secrets.token_hex(16)))
        prints = Fingerprints(engine.fingerprint, engine.layout)
        receiver = KvReceiver(memory, prints, MonotonicClock(), (TCP,), "127.0.0.1")
        validator = Validator(Limits(), checkpoint.vocab_size, checkpoint.context_tokens)
        limits = StepLimits(engine.layout.block_size, max_seqs, _CHUNK_TOKENS)
        worker = new_decode_worker(
            WorkerParts(engine.thread, engine.cache, validator, MonotonicClock()),
            receiver,
            WorkerPolicy(limits, engine.max_sequence_tokens, **policy),
        )
        await receiver.start()
        running = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await receiver.stop()
    finally:
        engine.close()


async def decode_together(worker: Worker, num_seqs: int, prompt_tokens: int, output_tokens: int) -> Router:
    """Greedy, end-of-text ignored; returns once every sequence has ended. Raises TandemError if one fails."""
    rng = random.Random(num_seqs)
    router = Router(num_seqs)
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0)
    for number in range(num_seqs):
        prompt = tuple(TokenId(rng.randrange(_FIRST_TOKEN_ID, 256)) for _ in range(prompt_tokens))
        worker.reserve(router, Handle(number), _spec(RequestId(f"idle-{number}"), prompt, sampling), True)
    async with asyncio.timeout(_WAIT_S):
        await router.done
        await worker.drained()
    return router


def _spec(request_id: RequestId, prompt: tuple[TokenId, ...], sampling: SamplingParams) -> Any:
    """As workers take it: a `SequenceSpec` in checkouts from before there was `GroupSpec`."""
    types: Any = importlib.import_module("tandem.types")
    if hasattr(types, "GroupSpec"):
        return types.GroupSpec(request_id, prompt, sampling)
    return types.SequenceSpec(request_id, prompt, len(prompt), sampling)


def summed_up(num_seqs: int, runs: Sequence[Sequence[tuple[float, float]]]) -> Idle:
    """Gaps within each run of steps."""
    gaps_s = [following[0] - one[1] for run in runs for one, following in pairwise(run)]
    steps_s = [end_s - begin_s for run in runs for begin_s, end_s in run]
    cycles_s = [following[0] - one[0] for run in runs for one, following in pairwise(run)]
    return Idle(
        num_seqs=num_seqs,
        num_gaps=len(gaps_s),
        idle_p50_ms=statistics.median(gaps_s) * 1e3,
        idle_p90_ms=quantile(sorted(gaps_s), 0.9) * 1e3,
        step_p50_ms=statistics.median(steps_s) * 1e3,
        cycle_p50_ms=statistics.median(cycles_s) * 1e3,
        idle_share=sum(gaps_s) / (sum(gaps_s) + sum(steps_s)),
    )


async def measure(args: argparse.Namespace) -> list[Idle]:
    """Each number of sequences `repeats` times, after a run that does not count."""
    times = StepTimes()
    times.watch(Runner)
    found = []
    policy = {"overlap_steps": False} if args.one_in_flight else {}
    async with open_worker(args.model, args.threads, max(args.seqs), policy) as worker:
        await decode_together(worker, max(args.seqs), args.prompt_tokens, 8)
        gc.collect()
        gc.freeze()  # as a worker process does once it has loaded
        for num_seqs in args.seqs:
            runs = []
            for _ in range(args.repeats):
                router = await decode_together(worker, num_seqs, args.prompt_tokens, args.output_tokens)
                runs.append(times.between(router.all_started_s, router.first_ended_s))
            found.append(summed_up(num_seqs, runs))
    return found


def main() -> int:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seqs", type=int, nargs="+", default=NUM_SEQS)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one-in-flight", action="store_true", help="no two steps in flight")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # the whole process, as `tandem serve` pins a worker
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.threads :])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(measure(args))
    print(json.dumps([asdict(each) for each in found], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
