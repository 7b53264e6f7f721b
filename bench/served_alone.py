"""`tandem serve` measured by itself: `python -m bench.served_alone MODEL`, first token and throughput.

Each deployment of `bench.peers.served` in turn: requests alone, then all streams at once, as there, but with
no other server beside it. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from bench.peers.served import TANDEM_SERVERS, Served, ServedShape, measure_turn, tandem_turns, warm_up
from models.files.checkpoint import read_checkpoint


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one deployment; medians."""

    tokens_per_s: float
    first_token_ms: float
    """Of a request alone."""
    alone_gap_ms: float
    together_gap_ms: float
    client_cpu_share: float


async def measure(model: Path, options: Sequence[str], shape: ServedShape, seed: int) -> Figures:
    """Starts one deployment, warms it up, measures one turn, stops it."""
    vocab_size = read_checkpoint(str(model)).vocab_size
    served = Served()
    async with tandem_turns(model, options) as turn, turn() as client:
        await warm_up(client, vocab_size)
        await measure_turn(client, shape, vocab_size, seed, served)
    return Figures(
        tokens_per_s=statistics.median(served.tokens_per_s),
        first_token_ms=statistics.median(served.alone_ttft_s) * 1e3,
        alone_gap_ms=statistics.median(served.alone_gap_s) * 1e3,
        together_gap_ms=statistics.median(served.gap_s) * 1e3,
        client_cpu_share=statistics.median(served.client_cpu_share),
    )


def main() -> int:
    """Prints the figures of each deployment by its name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=ServedShape().streams)
    parser.add_argument("--prompt-tokens", type=int, default=ServedShape().prompt_tokens)
    parser.add_argument("--output-tokens", type=int, default=ServedShape().output_tokens)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    shape = ServedShape(args.streams, args.prompt_tokens, args.output_tokens)

    async def main_task() -> dict[str, Figures]:
        return {name: await measure(args.model, options, shape, args.seed) for name, options in TANDEM_SERVERS.items()}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(main_task())
    print(json.dumps({name: asdict(figures) for name, figures in found.items()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
