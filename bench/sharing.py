"""What n choices of one request hold, against n requests of one choice: `python -m bench.sharing`.

Blocks are read from the decode pool's own accounting while all of them decode: the prompt's blocks are
held once by a group, and n times by single requests. Records `bench/results/sharing.json`.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from bench.cluster import POLL_S, becomes_idle, serve
from bench.record import write_record
from tandem.client import Client
from tandem.types import Role

BLOCK_SIZE = 16
COUNTS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Sharing:
    """One n: most blocks that lived at a time, time to the end, bytes handed over."""

    n: int
    group_blocks: int
    single_blocks: int
    group_s: float
    single_s: float
    group_bytes: int
    single_bytes: int

    @property
    def saved(self) -> float:
        """Share of blocks that the group does without."""
        return 1 - self.group_blocks / self.single_blocks


def measure(client: Client, n: int, prompt_tokens: int, output_tokens: int) -> Sharing:
    """Runs both forms with the same seeds. Raises RuntimeError if their tokens differ."""
    request = _request(prompt_tokens, output_tokens)
    singles: list[tuple[int, ...]] = []
    moved: list[int] = []

    def run_group() -> None:
        completion = client.complete(n=n, seed=1, **request)
        singles[:] = [choice.token_ids for choice in completion.choices]
        moved.append(completion.timings.transfer_bytes)

    def run_singles() -> None:
        with ThreadPoolExecutor(n) as callers:
            futures = [callers.submit(client.complete, seed=1 + i, **request) for i in range(n)]
            completions = [future.result() for future in futures]
        if [completion.choices[0].token_ids for completion in completions] != singles:
            raise RuntimeError(f"{n} choices differ from {n} requests")
        moved.append(sum(completion.timings.transfer_bytes for completion in completions))

    group_blocks, group_s = _peak_of(client, run_group)
    single_blocks, single_s = _peak_of(client, run_singles)
    return Sharing(n, group_blocks, single_blocks, group_s, single_s, moved[0], moved[1])


def _request(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    rng = random.Random(prompt_tokens)
    token_ids = tuple(rng.randrange(4, 600) for _ in range(prompt_tokens))
    return {"token_ids": token_ids, "max_tokens": output_tokens, "temperature": 1.0, "ignore_eos": True}


def _peak_of(client: Client, work: Callable[[], None]) -> tuple[int, float]:
    """Most live blocks of the decode pool while `work` runs, and how long it took; nothing else may run."""
    if not becomes_idle(client, 10):
        raise RuntimeError("blocks are held before the work begins")
    peak, done = 0, threading.Event()
    with ThreadPoolExecutor(1) as worker:
        began_s = time.monotonic()
        running = worker.submit(work)
        running.add_done_callback(lambda _: done.set())
        while not done.wait(POLL_S):
            live = [each.load.pool.live for each in client.status().workers if each.info.role is Role.DECODE]
            peak = max(peak, *live)
        seconds = time.monotonic() - began_s
        running.result()
    return peak, seconds


def main() -> int:
    """Prints and records the figures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=640)
    parser.add_argument("--output-tokens", type=int, default=320)
    args = parser.parse_args()
    with serve("demo", "--block-size", str(BLOCK_SIZE)) as cluster, Client(cluster.target) as client:
        client.wait_ready(timeout_s=30)
        rows = [measure(client, n, args.prompt_tokens, args.output_tokens) for n in COUNTS]
    for row in rows:
        print(
            f"n = {row.n:2}: {row.group_blocks} blocks against {row.single_blocks} ({row.saved:.0%} saved), "
            f"{row.group_bytes} bytes handed over against {row.single_bytes}, "
            f"{row.group_s:.2f} s against {row.single_s:.2f} s"
        )
    results = {
        "block_size": BLOCK_SIZE,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "rows": [asdict(row) | {"saved": row.saved} for row in rows],
    }
    write_record("sharing", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
