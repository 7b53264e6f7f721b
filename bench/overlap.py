"""What sending blocks while the next chunk computes saves: `python -m bench.overlap`.

One prefill and one decode worker per transport, with overlap and without (`--no-overlap`), up at the same time,
without prefix caches; one request at a time, each of them in turn. The first token leaves when the prompt is computed,
the second when its KV has been handed over and one step is done: so the gain is in the second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.overhead import Stream, run_stream
from bench.record import write_record
from bench.support.checkpoints import PEER_SHAPES, PeerShape, write_checkpoint
from bench.support.cluster import serve
from tandem.client import AsyncClient

CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one transport, with or without overlap."""

    transport: str
    overlap: bool
    first_token_ms: float
    second_token_ms: float
    """From the first on."""
    transfer_ms: float
    transfer_share: float
    """Of the time to the second token, what the sender spent in the hand-off."""


def _row(transport: str, overlap: bool, streams: list[Stream]) -> Row:
    first_s = statistics.median(stream.first_token_s for stream in streams)
    second_s = statistics.median(stream.arrivals[1][0] - stream.arrivals[0][0] for stream in streams)
    transfer_s = statistics.median(stream.timings.transfer_s for stream in streams)
    share = transfer_s / (first_s + second_s)
    return Row(transport, overlap, first_s * 1e3, second_s * 1e3, transfer_s * 1e3, share)


async def _ask(targets: list[str], prompt_tokens: int, rounds: int, seed: int) -> list[list[Stream]]:
    """Streams of each target; every round asks each for the same new prompt, after one that warms it."""
    rng = random.Random(seed)
    found: list[list[Stream]] = [[] for _ in targets]
    for _ in range(rounds + 1):
        prompt = tuple(rng.randrange(4, 256) for _ in range(prompt_tokens))
        for target, streams in zip(targets, found, strict=True):
            async with AsyncClient(target) as client:
                await client.wait_ready(timeout_s=60)
                streams.append((await run_stream(client, prompt, 2))[0])
    return [streams[1:] for streams in found]


def measure(shape: PeerShape, transports: list[str], prompt_tokens: int, rounds: int, seed: int) -> dict[str, Any]:
    """Figures of all transports, with and without overlap."""
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        write_checkpoint(shape, Path(folder))
        for transport in transports:
            options = ["--prefill", "1", "--decode", "1", "--threads", "1", "--transport", transport]
            options += ["--no-prefix-cache", "--chunk-tokens", str(CHUNK_TOKENS)]
            with serve(folder, *options) as overlapped, serve(folder, *options, "--no-overlap") as plain:
                found = asyncio.run(_ask([overlapped.target, plain.target], prompt_tokens, rounds, seed))
            rows += [_row(transport, overlap, streams) for overlap, streams in zip((True, False), found, strict=True)]
            transfer_bytes = found[0][0].timings.transfer_bytes
    return {
        "model": shape.name,
        "prompt_tokens": prompt_tokens,
        "chunk_tokens": CHUNK_TOKENS,
        "rounds": rounds,
        "transfer_bytes": transfer_bytes,
        "rows": [asdict(row) for row in rows],
    }


def main() -> int:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(PEER_SHAPES), default="135m", help="random weights")
    parser.add_argument("--transports", default="shm,tcp", help="comma-separated")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="write bench/results/overlap.json and the page")
    args = parser.parse_args()
    results = measure(PEER_SHAPES[args.shape], args.transports.split(","), args.prompt_tokens, args.rounds, args.seed)
    print(json.dumps(results, indent=2))
    if args.record:
        write_record("overlap", results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
