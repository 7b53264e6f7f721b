"""How soon everything is free again after a release, in every stage: `python -m bench.release`.

Both worker cores run in this process with real engines, a real sender and a real receiver; only
gRPC is left out, since the time counts from the release reaching the worker. In each round one
request is brought to the stage, released on both workers, and timed until every block of both
pools is free. Bound: 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass

from decode_worker.policy import WorkerPolicy
from decode_worker.scheduler import StepLimits
from decode_worker.worker import new_decode_worker
from engine.loading import Engine, EngineRole, load_engine
from engine.step import SampledToken
from kvtransfer.base import Fingerprints, PoolMemory
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from models.files.checkpoint import CheckpointInfo, read_checkpoint
from prefill_worker.prompt_line import LineLimits
from prefill_worker.prompts import PromptPolicy
from prefill_worker.worker import new_prefill_worker
from shell.clock import MonotonicClock
from shell.config import WorkerConfig
from tandem.errors import TandemError
from tandem.limits import Limits
from tandem.types import (
    FinishReason,
    GroupSpec,
    Handle,
    RequestId,
    SamplingParams,
    TokenId,
    TokenLogprobs,
    WaitReason,
    new_incarnation,
)
from tandem.validation import Validator
from worker.core import Worker
from worker.parts import WorkerParts
from worker.ports import RouterPort

BOUND_MS = 100.0
CHUNK_TOKENS = 128
PROMPT_TOKENS = 900
STAGE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Release to all free, in milliseconds."""

    stage: str
    rounds: int
    median_ms: float
    max_ms: float


class Port(RouterPort):
    """Stands in for a router on both workers: notes how far the one request is."""

    def __init__(self) -> None:
        self.ticket: bytes | None = None
        self.kv_endpoint = b""
        self.num_tokens = 0
        self._news = asyncio.Event()

    def reserved(self, handle: Handle, ticket: bytes = b"", kv_endpoint: bytes = b"", held_tokens: int = 0) -> None:
        """The decode worker made room."""
        self.ticket, self.kv_endpoint = ticket, kv_endpoint
        self._news.set()

    def prefill_started(self, handle: Handle) -> None:
        """Its first chunk is being computed."""

    def waiting(self, reason: WaitReason, handles: Sequence[Handle]) -> None:
        """Between two stages."""

    def prefill_done(self, handle: Handle, queue_s: float, prefill_s: float, cached_tokens: int = 0) -> None:
        """The first token follows."""

    def token(
        self,
        handle: Handle,
        index: int,
        offset: int,
        token: SampledToken,
        finish_reason: FinishReason | None,
        score: float | None = None,
    ) -> None:
        """The first one and all later ones."""
        self.num_tokens += 1
        self._news.set()

    def prompt_logprobs(self, handle: Handle, offset: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Nobody asks for them."""

    def leaving(self, handle: Handle) -> None:
        """Does not come: nothing drains."""

    def handoff_done(self, handle: Handle, num_bytes: int, seconds: float) -> None:
        """Attached."""

    def failed(self, handle: Handle, error: TandemError) -> None:
        """Not expected here."""
        raise error

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when news makes the condition true. Raises TimeoutError."""
        async with asyncio.timeout(STAGE_TIMEOUT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


class Pair:
    """One prefill and one decode worker in this process."""

    def __init__(self, prefill: Worker, decode: Worker, engines: tuple[Engine, Engine]) -> None:
        self.prefill = prefill
        self.decode = decode
        self._engines = engines
        self._num_handles = 0

    async def time_release(self, stage: Callable[[Port], Awaitable[None]], local_prefill: bool) -> float:
        """Brings one request to a stage, releases it, returns the milliseconds until all is free."""
        port, handle, spec = Port(), self._next_handle(), _spec()
        self.decode.reserve(port, handle, spec, local_prefill)
        await port.until(lambda: port.ticket is not None)
        if not local_prefill:
            self.prefill.prefill(port, handle, spec, "decode")
            self.prefill.grant(port, handle, port.ticket or b"", port.kv_endpoint)
        await stage(port)
        released_s = time.perf_counter()
        self.decode.release(port, handle)
        self.prefill.release(port, handle)
        async with asyncio.timeout(STAGE_TIMEOUT_S):
            while not self._all_free():  # noqa: ASYNC110 - an event would have to be built into what is measured
                await asyncio.sleep(0)
        return (time.perf_counter() - released_s) * 1e3

    def _all_free(self) -> bool:
        return all(engine.pool.num_free == engine.pool.num_blocks for engine in self._engines)

    def _next_handle(self) -> Handle:
        self._num_handles += 1
        return Handle(self._num_handles)


async def _granted(port: Port) -> None:
    """Reserved; the prefill worker has only just heard of it."""


async def _computing(port: Port) -> None:
    """In the middle of the chunks: a few of the eight have been computed."""
    await asyncio.sleep(0.03)


async def _first_token(port: Port) -> None:
    """The first token is out, the hand-off under way."""
    await port.until(lambda: port.num_tokens >= 1)


async def _decoding(port: Port) -> None:
    """In the running batch."""
    await port.until(lambda: port.num_tokens >= 5)


STAGES: tuple[tuple[str, Callable[[Port], Awaitable[None]], bool], ...] = (
    ("granted", _granted, False),
    ("prefill chunks", _computing, False),
    ("hand-off", _first_token, False),
    ("decoding", _decoding, False),
    ("local prefill chunks", _computing, True),
)


def _spec() -> GroupSpec:
    token_ids = tuple(TokenId(5 + number % 200) for number in range(PROMPT_TOKENS))
    return GroupSpec(RequestId("release"), token_ids, SamplingParams(max_tokens=100, temperature=0.0))


@contextlib.asynccontextmanager
async def open_pair(model: str) -> AsyncIterator[Pair]:
    """Loads two engines and runs both workers until the context ends."""
    checkpoint = read_checkpoint(model)
    prefill_engine, decode_engine = (_load(checkpoint, shared_kv=shared) for shared in (False, True))
    clock, validator = MonotonicClock(), Validator(Limits(), checkpoint.vocab_size, checkpoint.context_tokens)
    sender = KvSender(_memory(prefill_engine), _prints(prefill_engine), clock, "shm")
    receiver = KvReceiver(_memory(decode_engine), _prints(decode_engine), clock, ("shm",), "127.0.0.1")
    longest = decode_engine.max_sequence_tokens
    prefill = new_prefill_worker(
        WorkerParts(prefill_engine.thread, prefill_engine.cache, validator, clock),
        sender,
        PromptPolicy(LineLimits(16), longest, CHUNK_TOKENS),
    )
    decode = new_decode_worker(
        WorkerParts(decode_engine.thread, decode_engine.cache, validator, clock),
        receiver,
        WorkerPolicy(StepLimits(decode_engine.pool.block_size, 16, CHUNK_TOKENS), longest),
    )
    await receiver.start()
    loops = [asyncio.create_task(prefill.run()), asyncio.create_task(decode.run())]
    try:
        yield Pair(prefill, decode, (prefill_engine, decode_engine))
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await sender.stop()
        await receiver.stop()
        prefill_engine.close()
        decode_engine.close()


def _load(checkpoint: CheckpointInfo, *, shared_kv: bool) -> Engine:
    """Without a prefix cache: every round computes the same prompt."""
    config = WorkerConfig(model=str(checkpoint.path), prefix_cache=False, threads=1)
    return load_engine(config, EngineRole(shared_kv=shared_kv))


def _memory(engine: Engine) -> PoolMemory:
    return PoolMemory(engine.kv_cache.host_rows, engine.kv_cache.shared_fd, new_incarnation(), engine.kv_cache.staging)


def _prints(engine: Engine) -> Fingerprints:
    return Fingerprints(engine.fingerprint, engine.layout)


async def measure(model: str, rounds: int) -> list[StageTimes]:
    """Every stage, `rounds` times after one round that warms up."""
    times = []
    async with open_pair(model) as pair:
        for name, stage, local_prefill in STAGES:
            took_ms = [await pair.time_release(stage, local_prefill) for _ in range(rounds + 1)][1:]
            times.append(StageTimes(name, rounds, statistics.median(took_ms), max(took_ms)))
    return times


def main() -> int:
    """Prints JSON; 0 if the slowest round stayed within the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    times = asyncio.run(measure(args.model, args.rounds))
    print(json.dumps([asdict(each) for each in times], indent=2))
    return 0 if max(each.max_ms for each in times) <= BOUND_MS else 1


if __name__ == "__main__":
    sys.exit(main())
