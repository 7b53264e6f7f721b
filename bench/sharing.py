"""What the choices of one request share, against as many requests of one choice: `python -m bench.sharing`.

Parallel sampling (n choices) and beam search (n beams, their n best as choices), with prefix caches off, so that
single requests share nothing. Two parts, each on a cluster of its own:

    memory      most blocks that live at a time in the decode pool, by its own accounting, while one request of n
                decodes, and while n requests do; bytes handed over. Sampled choices must be those of the requests.
    throughput  a pool that holds `POOL_SEQUENCES` single requests; the same number of sequences is asked for at once,
                in requests of n and in single ones: how much sooner the former have ended. Median of the rounds,
                in which both take turns.

A single request that stands for a beam samples: as many tokens, as many blocks, no other beam's.
`--record` writes `bench/results/sharing.json`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from bench.record import write_record
from bench.support.cluster import POLL_S, becomes_idle, serve
from tandem.client import Client, Completion, GenerateOptions
from tandem.types import Role

BLOCK_SIZE = 16
COUNTS = (2, 4, 8)
KINDS = ("sampling", "beams")
POOL_SEQUENCES = 8
TIMEOUT_S = 300.0
_OPTIONS = ("--no-prefix-cache", "--block-size", str(BLOCK_SIZE))


@dataclass(frozen=True, slots=True)
class Shape:
    """Every request's lengths."""

    prompt_tokens: int
    output_tokens: int

    @property
    def blocks(self) -> int:
        """Of one sequence at its end, with nothing shared."""
        return -(-(self.prompt_tokens + self.output_tokens) // BLOCK_SIZE)

    def single(self, number: int) -> GenerateOptions:
        """One choice; the number is its seed."""
        rng = random.Random(self.prompt_tokens)
        return GenerateOptions(
            token_ids=[rng.randrange(4, 600) for _ in range(self.prompt_tokens)],
            max_tokens=self.output_tokens,
            temperature=1.0,
            seed=number,
            ignore_eos=True,
        )

    def group(self, kind: str, n: int, number: int) -> GenerateOptions:
        """The choices of the single requests from `number` on, or beams instead."""
        beams = GenerateOptions(beam_width=n) if kind == "beams" else GenerateOptions()
        return {**self.single(number), "n": n, **beams}


@dataclass(frozen=True, slots=True)
class Memory:
    """One n: most blocks that lived at a time, and bytes handed over."""

    kind: str
    n: int
    group_blocks: int
    single_blocks: int
    group_bytes: int
    single_bytes: int

    @property
    def saved(self) -> float:
        """Share of blocks that the group does without."""
        return 1 - self.group_blocks / self.single_blocks


@dataclass(frozen=True, slots=True)
class Throughput:
    """One n: the same number of sequences, in groups and as single requests, in a pool too small for all at once."""

    kind: str
    n: int
    sequences: int
    group_s: float
    single_s: float
    gain: float
    """Tokens per second of groups in units of those of single requests: the median of the rounds' own."""


def measure_memory(client: Client, kind: str, n: int, shape: Shape) -> Memory:
    """Runs both forms. Raises RuntimeError if sampled choices are not those of single requests."""
    group, group_blocks = _peak_of(client, lambda: _ask(client, [shape.group(kind, n, 1)]))
    singles, single_blocks = _peak_of(client, lambda: _ask(client, [shape.single(1 + index) for index in range(n)]))
    if kind == "sampling" and _tokens(group) != _tokens(singles):
        raise RuntimeError(f"{n} choices differ from {n} requests")
    return Memory(kind, n, group_blocks, single_blocks, _bytes(group), _bytes(singles))


def measure_throughput(client: Client, kind: str, n: int, shape: Shape, sequences: int, rounds: int) -> Throughput:
    """Both forms, one after the other, round after round."""
    groups = [shape.group(kind, n, 1 + first) for first in range(0, sequences, n)]
    singles = [shape.single(1 + index) for index in range(len(groups) * n)]
    times_s = [(_seconds(client, groups), _seconds(client, singles)) for _ in range(rounds)]
    group_s, single_s = (statistics.median(each) for each in zip(*times_s, strict=True))
    gain = statistics.median(single / group for group, single in times_s)
    return Throughput(kind, n, len(singles), group_s, single_s, gain)


def _ask(client: Client, requests: Sequence[GenerateOptions]) -> list[Completion]:
    """All at once."""
    with ThreadPoolExecutor(len(requests)) as callers:
        futures = [callers.submit(client.complete, timeout_s=TIMEOUT_S, **options) for options in requests]
        return [future.result() for future in futures]


def _tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [choice.token_ids for completion in completions for choice in completion.choices]


def _bytes(completions: Sequence[Completion]) -> int:
    return sum(completion.timings.transfer_bytes for completion in completions)


def _seconds(client: Client, requests: Sequence[GenerateOptions]) -> float:
    _wait_idle(client)
    began_s = time.monotonic()
    _ask(client, requests)
    return time.monotonic() - began_s


def _peak_of(client: Client, work: Callable[[], list[Completion]]) -> tuple[list[Completion], int]:
    """What `work` returns, and most live blocks of the decode pool while it runs; nothing else may run."""
    _wait_idle(client)
    peak, done = 0, threading.Event()
    with ThreadPoolExecutor(1) as worker:
        running = worker.submit(work)
        running.add_done_callback(lambda _: done.set())
        while not done.wait(POLL_S):
            live = [each.load.pool.live for each in client.status().workers if each.info.role is Role.DECODE]
            peak = max(peak, *live)
        return running.result(), peak


def _wait_idle(client: Client) -> None:
    if not becomes_idle(client, 10):
        raise RuntimeError("blocks are held before the work begins")


def _measure(shape: Shape, sequences: int, rounds: int) -> dict[str, Any]:
    """Both parts, as they are recorded."""
    cases = [(kind, n) for kind in KINDS for n in COUNTS]
    with serve("demo", *_OPTIONS) as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=30)
        memory = [measure_memory(client, kind, n, shape) for kind, n in cases]
    small = ("--kv-blocks", str(POOL_SEQUENCES * shape.blocks), "--max-seqs", str(sequences))
    with serve("demo", *_OPTIONS, *small) as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=30)
        _ask(client, [shape.single(0)])  # warm
        throughput = [measure_throughput(client, kind, n, shape, sequences, rounds) for kind, n in cases]
    return {
        "block_size": BLOCK_SIZE,
        "pool_sequences": POOL_SEQUENCES,
        "rounds": rounds,
        **asdict(shape),
        "memory": [asdict(each) | {"saved": each.saved} for each in memory],
        "throughput": [asdict(each) for each in throughput],
    }


def main() -> int:
    """Prints, and records if told to; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=640)
    parser.add_argument("--output-tokens", type=int, default=320)
    parser.add_argument("--sequences", type=int, default=64, help="of each throughput run")
    parser.add_argument("--rounds", type=int, default=3, help="of throughput")
    parser.add_argument("--record", action="store_true", help="write bench/results/sharing.json and the page")
    args = parser.parse_args()
    results = _measure(Shape(args.prompt_tokens, args.output_tokens), args.sequences, args.rounds)
    for row in results["memory"]:
        print(
            f"{row['kind']}, n = {row['n']}: {row['group_blocks']} blocks against {row['single_blocks']} "
            f"({row['saved']:.0%} saved), {row['group_bytes']} bytes handed over against {row['single_bytes']}"
        )
    for row in results["throughput"]:
        print(
            f"{row['kind']}, n = {row['n']}: {row['sequences']} sequences in {row['group_s']:.2f} s "
            f"against {row['single_s']:.2f} s ({row['gain']:.2f} times the throughput)"
        )
    if args.record:
        write_record("sharing", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
