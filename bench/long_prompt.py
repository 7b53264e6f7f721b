"""What the longest prompts cost a decode worker's event loop: `python -m bench.long_prompt [--before DIR] [--record]`.

Walks one prompt through the calls that the loop makes for it, one after the other, each timed by the processor time of
this thread: the Reserve message parsed and read (in pieces: the longest), the request put in line, admitted (in the
loop's own callbacks: the longest), its blocks reserved and its ticket minted, the ticket shown, the blocks written and
committed, taken over by batch and cache, one step, the release; the same prompt once more, found in the cache; one that
is computed here; and the eviction of one. The table of offers, the pool, the cache and the core are the real ones.
Prints JSON: milliseconds by call.

`--before DIR` measures another checkout in turns with this one, in processes of their own; the best of `--repeats`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from decode_worker.policy import WorkerPolicy
from decode_worker.scheduler import StepLimits
from decode_worker.worker import new_decode_worker
from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from engine.step import SampledToken, Step, StepResult
from kvtransfer.base import HandoffListener, Offer
from kvtransfer.messages import MAX_BLOCKS_PER_WRITE, Commit, Write, digest_of
from kvtransfer.offers import OfferTable
from shell.clock import MonotonicClock
from tandem.convert import group_from_proto, group_to_proto
from tandem.first_tokens import encode_first_tokens
from tandem.limits import Limits
from tandem.types import GroupSpec, Handle, Incarnation, RequestId, SamplingParams, TokenId
from tandem.v1 import worker_pb2
from tandem.validation import Validator
from worker.core import Worker
from worker.parts import WorkerParts
from worker.serving import service
from worker.serving.cache_reports import CacheReports
from worker.serving.router_session import RouterSession

_BLOCK_SIZE = 16
_VOCAB_SIZE = 1 << 17
_HANDLE = Handle(1)


@dataclass
class Times:
    """Milliseconds by call, the longest of each name."""

    ms: dict[str, float] = field(default_factory=dict)
    _is_own: bool = False
    """Whether the callback of the loop that runs now is one of this measurement."""

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """The time inside."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.ms[name] = max(self.ms.get(name, 0.0), (time.thread_time() - began) * 1e3)
            self._is_own = True

    def is_own(self) -> None:
        """What runs now is the measurement's."""
        self._is_own = True

    def watch(self) -> None:
        """Every callback of the loop is timed from now on, but for those of this measurement."""
        run: Callable[[asyncio.Handle], None] = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            self._is_own, began = False, time.thread_time()
            run(handle)
            if not self._is_own:
                spent_ms = (time.thread_time() - began) * 1e3
                self.ms["a callback of the loop"] = max(self.ms.get("a callback of the loop", 0.0), spent_ms)

        setattr(asyncio.Handle, "_run", timed)  # noqa: B010 - it is a method


class Table:
    """A `kvtransfer.base.Receiver` without sessions."""

    def __init__(self, num_blocks: int) -> None:
        self.offers = OfferTable(Incarnation("ab" * 16), "cd" * 16, num_blocks, MonotonicClock())
        self.num_live = 0
        self.ticket = b""
        self.number = 0

    def offer(self, blocks: Any, listener: HandoffListener, expires_in_s: float, first_block: int = 0) -> Offer:
        """As a receiver does."""
        ticket = self.offers.mint(blocks, listener, expires_in_s, first_block)
        self.ticket, self.number = ticket.encode(), ticket.number
        return Offer(ticket.transfer_id, self.ticket, b"endpoint")

    def withdraw(self, transfer_id: str) -> None:
        """As a receiver does."""
        self.offers.withdraw(transfer_id)

    def reap(self) -> None:
        """As a receiver does."""
        self.offers.reap()


class Engine:
    """Draws token 5 from every row, at once."""

    num_steps = 0

    def launch(self, step: Step) -> asyncio.Future[StepResult]:
        """As the engine's thread."""
        self.num_steps += 1
        ended = asyncio.get_running_loop().create_future()
        outputs = tuple(tuple((SampledToken(TokenId(5), None),) for _ in seq.samples) for seq in step.seqs)
        ended.set_result(StepResult(outputs, 0.01))
        return ended


class Stopping:
    """A `kvtransfer.incoming.Writer` that has stopped."""

    def stop_writing(self, number: int, error: Exception) -> bool:
        """It cannot write."""
        return True


async def measure(num_tokens: int) -> dict[str, float]:
    """Milliseconds by call."""
    times = Times()
    num_blocks = 3 * (num_tokens // _BLOCK_SIZE) + 64
    pool = BlockPool(num_blocks, _BLOCK_SIZE)
    cache, table, clock = PrefixCache(pool), Table(num_blocks), MonotonicClock()
    cache.listener = reports = CacheReports(cache)
    validator = Validator(Limits(), _VOCAB_SIZE, num_tokens + 4096)
    engine: Any = Engine()
    receiver: Any = table
    worker = new_decode_worker(
        WorkerParts(engine, cache, validator, clock),
        receiver,
        WorkerPolicy(StepLimits(_BLOCK_SIZE, 8, 8192), num_tokens + 4096),
    )
    session = RouterSession(Incarnation("ab" * 16))
    running = asyncio.ensure_future(worker.run())
    prompt = tuple(TokenId(number * 7919 % _VOCAB_SIZE) for number in range(num_tokens))
    spec = GroupSpec(RequestId("long"), prompt, SamplingParams(max_tokens=4, temperature=0.0))
    reserve = worker_pb2.ConnectRequest(
        reserve=worker_pb2.Reserve(handle=_HANDLE, group=group_to_proto(spec))
    ).SerializeToString()
    own = group_to_proto(replace(spec, request_id=RequestId("own"), prompt_token_ids=prompt[::-1]))
    with reports.telling(session.cache_news):
        gc.collect()
        gc.freeze()  # as a worker process does once it has loaded
        times.watch()
        for turn in ("", " again"):
            await _hand_off(times, worker, session, table, reserve, turn)
        session.open_handle(_HANDLE)
        read = await _read(times, "", own)
        with times.call("reserve, to be computed here"):
            worker.reserve(session, _HANDLE, read, True)
        while worker.load().running_seqs or worker.load().waiting_seqs:
            await asyncio.sleep(0.01)
            session.take()
        held = cache.allocate(pool.num_free)
        with times.call("evict for another"):
            evicted = cache.allocate(num_tokens // _BLOCK_SIZE)
        await asyncio.sleep(0.5)
        times.is_own()
        found = dict(times.ms)
        pool.release((*held, *evicted))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return found


async def _hand_off(
    times: Times, worker: Worker, session: RouterSession, table: Table, reserve: bytes, turn: str
) -> None:
    with times.call("Reserve parsed" + turn):
        message = worker_pb2.ConnectRequest.FromString(reserve)
    spec = await _read(times, turn, message.reserve.group)
    session.open_handle(_HANDLE)
    table.ticket = b""
    with times.call("reserve" + turn):
        worker.reserve(session, _HANDLE, spec, False)
    while not table.ticket:  # noqa: ASYNC110
        await asyncio.sleep(0)
    with times.call("Reserved written" + turn):
        for each in session.take():
            each.SerializeToString()
    with times.call("ticket shown" + turn):
        table.offers.show(table.number, table.ticket, Stopping())
    ticket = table.offers._offers[table.number].ticket
    first, end = ticket.first_block, ticket.end
    checksums, num_writes = tuple(range(first, end)), 0
    digest = digest_of(checksums)
    for start in range(first, end, MAX_BLOCKS_PER_WRITE):
        write = Write(start, checksums[start - first : start - first + MAX_BLOCKS_PER_WRITE])
        with times.call("a WRITE"):
            table.offers.claim(table.number, num_writes, write)
            table.offers.verify(table.number, write, write.checksums)
        num_writes += 1
    with times.call("commit" + turn):
        table.offers.commit(table.number, Commit(num_writes, digest, encode_first_tokens({0: TokenId(5)})))
    while worker.load().running_seqs or worker.load().waiting_seqs:  # noqa: ASYNC110
        await asyncio.sleep(0)
    with times.call("tokens and news written" + turn):
        for each in session.take():
            each.SerializeToString()
    session.close_handle(_HANDLE)
    with times.call("release" + turn):
        worker.release(session, _HANDLE)


async def _read(times: Times, turn: str, message: worker_pb2.Group) -> GroupSpec:
    """As the service does, each turn of the loop timed."""
    reading: Any = getattr(service, "_group", _read_at_once)(message)  # checkouts differ
    while True:
        with times.call("Reserve read" + turn):
            try:
                reading.send(None)
            except StopIteration as ended:
                return cast("GroupSpec", ended.value)
        await asyncio.sleep(0)


async def _read_at_once(message: worker_pb2.Group) -> GroupSpec:
    return group_from_proto(message)


def _best_of(repeats: int, checkout: Path, num_tokens: int) -> dict[str, float]:
    """The least of each figure, of the code in `checkout`, by this file's measurement."""
    command = [sys.executable, "-P", __file__, "--tokens", str(num_tokens), "--once"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    best: dict[str, float] = {}
    for _ in range(repeats):
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=checkout)
        found: dict[str, float] = json.loads(done.stdout)
        best = {name: min(best.get(name, ms), ms) for name, ms in found.items()}
    return best


def main() -> int:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another checkout, measured too")
    parser.add_argument("--once", action="store_true", help="measure once, in this process")
    parser.add_argument("--record", action="store_true", help="write bench/results/long-prompt.json")
    args = parser.parse_args()
    if args.once:
        print(json.dumps(asyncio.run(measure(args.tokens))))
        return 0
    sides = {} if args.before is None else {"before": _best_of(args.repeats, args.before, args.tokens)}
    sides["after"] = _best_of(args.repeats, Path(__file__).parents[1], args.tokens)
    results = {"num_tokens": args.tokens, "block_size": _BLOCK_SIZE, **sides}
    if args.record:
        from bench.record import commit_of, write_record

        if args.before is not None:
            results["before_commit"] = commit_of(args.before)
        write_record("long-prompt", results)
    print(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
