"""What a step costs the decode worker's event loop: `python -m bench.control_loop [--before DIR] [--record]`.

A real decode worker core with its step loop, pool, prefix cache and one router's session, and the real engine thread
and runner; in the place of the model a function that always answers at once. All sequences decode together. Counted
is the processor time of the loop's thread alone, per step, and how much of it is spent in

    plan      which sequences step, their blocks, the `Step`
    prepare   the batch's tensors and the plan of its draws
    collect   the drawn tokens, read from the engine
    messages  what waits for the router, taken and serialized
    rest      tokens applied and told, and all else

`--before DIR` measures another checkout in turns with this one, in processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from decode_worker.policy import WorkerPolicy
from decode_worker.scheduler import StepLimits
from decode_worker.worker import new_decode_worker
from engine.block_pool import BlockPool
from engine.engine_thread import EngineThread
from engine.kv_cache import KvCache
from engine.placement import open_engine_executor
from engine.prefix_cache import PrefixCache
from engine.runner import Runner
from kernels.operations import Kernels
from kernels.reference import ReferenceBackend
from kernels.reference_operations import ReferenceOperations
from shell.clock import MonotonicClock
from tandem.kv_layout import DType, KvLayout
from tandem.limits import Limits
from tandem.types import GroupSpec, Handle, Incarnation, RequestId, SamplingParams, TokenId
from tandem.validation import Validator
from worker.parts import WorkerParts
from worker.serving.router_session import RouterSession

NUM_SEQS = (1, 64, 256, 1024)
_VOCAB_SIZE = 64
_DRAWN_ID = 7
_BLOCK_SIZE = 16
_PROMPT_TOKENS = 24
_CHUNK_TOKENS = 8192
_WARM_STEPS = 8
_WAIT_S = 120.0
_PARTS = ("plan", "prepare", "collect", "apply", "messages")


class Answers:
    """In the place of a model: every row draws the same token."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Logits `[R, V]`."""
        logits = torch.zeros(len(inputs[-1]), _VOCAB_SIZE)
        logits[:, _DRAWN_ID] = 1.0
        return logits


def _row_max(rows: torch.Tensor) -> torch.Tensor:
    return rows.argmax(-1)


class Spent:
    """Processor time of the loop's thread, by part of a step, in seconds."""

    def __init__(self) -> None:
        self.by_part: Counter[str] = Counter()

    def watch(self, cls: type, names: Sequence[str], part: str) -> None:
        """From now on, calls of these methods are counted; a call within one of the same part is not counted again."""
        for name in names:
            setattr(cls, name, self._timed(getattr(cls, name), part))

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """The time inside counts."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.by_part[part] += time.thread_time() - began  # type: ignore[assignment]

    def _timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            with self.part(part):
                return call(*args, **options)

        return timed


async def _write(session: RouterSession, spent: Spent) -> None:
    """As the service does, to nowhere."""
    while True:
        await session.wait()
        with spent.part("messages"):
            for message in session.take():
                message.SerializeToString()


async def measure(num_seqs: int, num_steps: int, spent: Spent) -> dict[str, float]:
    """Milliseconds per step, in all and by part, while `num_seqs` sequences decode."""
    num_blocks = num_seqs * (2 + -(-(_PROMPT_TOKENS + num_steps + 4 * _WARM_STEPS) // _BLOCK_SIZE))
    cache = KvCache.create(KvLayout(1, 1, _BLOCK_SIZE, 8, DType.FLOAT32), num_blocks, torch.device("cpu"))
    kernels = replace(Kernels(ReferenceBackend(), ReferenceOperations()), row_max=_row_max)
    answers: Any = Answers()
    engine = EngineThread(Runner(answers, cache, kernels), open_engine_executor())
    clock: Any = MonotonicClock()
    receiver: Any = _NoHandOffs()
    limits = StepLimits(_BLOCK_SIZE, num_seqs, _CHUNK_TOKENS)
    parts: Any = WorkerParts(
        engine, PrefixCache(BlockPool(num_blocks, _BLOCK_SIZE)), Validator(Limits(), _VOCAB_SIZE, 4096), clock
    )
    worker = new_decode_worker(parts, receiver, WorkerPolicy(limits, 4096))
    session = _session()
    tasks = [asyncio.ensure_future(worker.run()), asyncio.ensure_future(_write(session, spent))]
    sampling = SamplingParams(max_tokens=num_steps + 3 * _WARM_STEPS, temperature=0.0)
    for number in range(num_seqs):
        prompt = tuple(TokenId(1 + (number + at) % (_VOCAB_SIZE - 1)) for at in range(_PROMPT_TOKENS))
        session.open_handle(Handle(number))
        worker.reserve(session, Handle(number), GroupSpec(RequestId(f"r{number}"), prompt, sampling), True)
    async with asyncio.timeout(_WAIT_S):
        while worker.load().queued_prompt_tokens or worker.load().running_seqs < num_seqs:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        first = engine.num_steps + _WARM_STEPS
        await _reached(engine, first)
        gc.collect()
        gc.freeze()  # as a worker process does once it has loaded
        spent.by_part.clear()
        first, began = engine.num_steps, time.thread_time()
        await _reached(engine, first + num_steps)
        total_s, steps = time.thread_time() - began, engine.num_steps - first
        found = {part: spent.by_part[part] / steps * 1e3 for part in _PARTS}
        await worker.drained()
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    engine.close()
    cache.close()
    return {"total": total_s / steps * 1e3, **found, "rest": total_s / steps * 1e3 - sum(found.values())}


def _session() -> RouterSession:
    session: Any = RouterSession
    columns = {"takes_columns": True} if "takes_columns" in inspect.signature(session).parameters else {}
    opened: RouterSession = session(Incarnation("ab" * 16), **columns)  # checkouts differ
    return opened


class _NoHandOffs:
    """In the place of a receiver: every prompt is computed here."""

    num_live = 0

    def reap(self) -> None:
        """Nothing is offered."""


async def _reached(engine: EngineThread, num_steps: int) -> None:
    while engine.num_steps < num_steps:  # noqa: ASYNC110
        await asyncio.sleep(0.002)


def _this_side(num_seqs: Sequence[int], num_steps: int, spent: Spent) -> dict[str, dict[str, float]]:
    return {str(each): asyncio.run(measure(each, num_steps, spent)) for each in num_seqs}


def _watch(spent: Spent) -> None:
    from decode_worker.running_batch import RunningBatch

    spent.watch(RunningBatch, ("next_step", "step_behind"), "plan")
    from worker.steps import StepLoop

    spent.watch(StepLoop, [name for name in ("_apply_rows",) if hasattr(StepLoop, name)], "apply")
    spent.watch(StepLoop, ["_report"], "apply")
    spent.watch(Runner, ("prepare",), "prepare")
    spent.watch(Runner, ("collect",), "collect")


def _other_side(checkout: Path, num_seqs: Sequence[int], num_steps: int) -> dict[str, dict[str, float]]:
    """The same of the code in `checkout`, by this file's measurement."""
    command = [sys.executable, "-P", __file__, "--steps", str(num_steps), "--seqs", *map(str, num_seqs)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=checkout)
    found: dict[str, dict[str, dict[str, float]]] = json.loads(done.stdout)
    return found["after"]


def main() -> int:
    """Prints JSON: milliseconds per step, by side and number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", type=int, nargs="+", default=NUM_SEQS)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--before", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--record", action="store_true", help="write bench/results/control-loop.json")
    args = parser.parse_args()
    spent = Spent()
    _watch(spent)
    sides: dict[str, dict[str, dict[str, float]]] = {}
    if args.before is not None:
        sides["before"] = {}
    sides["after"] = {}
    for num_seqs in args.seqs:
        if args.before is not None:
            sides["before"] |= _other_side(args.before, [num_seqs], args.steps)
        sides["after"] |= _this_side([num_seqs], args.steps, spent)
    if args.record:
        from bench.record import commit_of, write_record

        write_record("control-loop", sides | ({} if args.before is None else {"before_commit": commit_of(args.before)}))
    print(json.dumps(sides, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
