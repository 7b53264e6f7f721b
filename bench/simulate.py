"""Tandem on a simulated clock (see `simulator`): goodput, attainment and use of any deployment under any trace.

    python -m bench.simulate --cost-model FILE --fleet 2P3D --trace poisson --rate 4 --ttft 2 --itl 0.1 [--search]
    python -m bench.simulate --calibrate MODEL --threads 2 --cost-model FILE     fits FILE to this machine

A fleet is `xPyD`, `N colocated` or `N auto`. Traces: poisson, bursty, conversation, agentic, or a file of JSON lines
as Mooncake publishes them. With `--lose-every S` one worker is lost each S seconds, and back after `--back-after`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import torch
import uvloop

from bench.peers.servers import DISAGGREGATED, TANDEM_SERVERS, Server, tandem_turns, warm_up
from bench.support.step_timer import StepTimer
from bench.support.streams import Stream, StreamClient, fresh_prompts
from engine.allocator import keep_freed_memory
from engine.chunking import ChunkTokens
from engine.step import Step
from kernels.dispatch import AUTO, select_kernels
from models.loading import LoadedModel, load_model
from shell.cores import usable_cores
from simulator.cluster import Failures, Fleet, Policy, Setup, simulate
from simulator.costs import CostModel, Fit, Sharing, StepWork, fit, read_costs
from simulator.outcomes import Slo
from simulator.sizing import highest_rate
from simulator.traces import Dialogue, LogNormal, MakeTrace, at_rate, conversation, independent, read_jsonl

_VARIATION = 3.0
"""Of the gaps of a bursty trace."""


CHAT_ALONE = (LogNormal(300, 0.8, 16, 2048), LogNormal(60, 0.6, 8, 256))
"""Prompts and outputs of single requests."""
DIALOGUES: Mapping[str, Dialogue] = {
    "conversation": Dialogue(
        256, LogNormal(4, 0.5, 1, 12), LogNormal(400, 1.0, 16, 8000), LogNormal(100, 0.6, 16, 400), pause_s=10.0
    ),
    "agentic": Dialogue(
        3000, LogNormal(6, 0.4, 2, 16), LogNormal(1200, 1.0, 64, 12000), LogNormal(60, 0.8, 8, 300), pause_s=2.0
    ),
}


_SEQS = (1, 4, 8, 16)
_CONTEXTS = (128, 1024)
_CHUNKS = (4, 16, 32, 64, 256, 512)
_BEFORE = (0, 1024)
_MIXED = ((1, 4), (1, 8), (2, 16), (1, 32), (4, 8), (4, 16), (4, 64), (8, 8), (8, 128), (8, 512))
"""(sequences that decode, prompt tokens beside them)"""
_CONTEXT_OF_MIXED = 300
_REPEATS = 3
_SHARED_PROMPTS, _SHARED_PROMPT_TOKENS = 6, 512
_SHARED_STREAMS, _SHARED_CONTEXT, _SHARED_TOKENS = 4, 64, 400
"""Streams last longer than the prompts beside them."""
BLOCK_SIZE = 16


def calibrate(model: Path, threads: int, device: str = "cpu") -> tuple[CostModel, Fit]:
    """Times decode steps, chunks of prompts, and both together; then how much two served workers slow each other.

    The latter on a CPU with cores for two, each with cores of its own that it lends to the other: steps are those of a
    worker alone, which has the cores of all. Takes about 45 s for 135M on two cores.
    """
    cores = usable_cores()
    has_room = device == "cpu" and len(cores) >= 2 * threads
    workers_per_host = len(cores) // threads if has_room else 1
    with _bound(cores[: workers_per_host * threads] if has_room else cores):
        loaded, timer, chunk_tokens = _timer(model, workers_per_host * threads, device)
        try:
            samples = [(StepWork.of(step), timer.median_s(step, _REPEATS)) for step in _steps(timer)]
        finally:
            timer.close()
    sharing = Sharing()
    if has_room:
        with _bound(cores[: 2 * threads]):
            sharing = _sharing(model, loaded.config.vocab_size)
    fitted = fit(samples)
    layout = loaded.kv_layout(BLOCK_SIZE)
    costs = CostModel(
        fitted.costs,
        sharing=sharing,
        workers_per_host=workers_per_host,
        threads=threads,
        block_size=BLOCK_SIZE,
        chunk_tokens=chunk_tokens.beside,
        prefill_chunk_tokens=chunk_tokens.alone,
        kv_bytes_per_token=layout.block_bytes // BLOCK_SIZE,
        source=f"steps measured here, {threads} thread(s) on {device}"
        f"{'' if device == 'cpu' else ', without CUDA graphs'}; they differ by {fitted.median_error:.0%} (median); "
        "pool, seats, hand-offs and messages are assumed",
    )
    return costs, fitted


def _timer(model: Path, threads: int, device: str) -> tuple[LoadedModel, StepTimer, ChunkTokens]:
    """And what workers there have by default."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    target = torch.device(device)
    kernels = select_kernels(AUTO, target, torch.bfloat16)
    loaded = load_model(model, "bfloat16", target, kernels)
    timer = StepTimer(loaded, BLOCK_SIZE, _SEQS[-1] * (_CONTEXTS[-1] + BLOCK_SIZE), kernels)
    return loaded, timer, ChunkTokens.of(0, target, kernels.full_tokens)


def _steps(timer: StepTimer) -> list[Step]:
    steps = [timer.step(seqs, context, 1) for seqs, context in product(_SEQS, _CONTEXTS)]
    steps += [timer.step(1, before, chunk) for chunk, before in product(_CHUNKS, _BEFORE)]
    for seqs, chunk in _MIXED:
        parts = timer.step(seqs, _CONTEXT_OF_MIXED, 1), timer.step(1, 0, chunk)
        steps.append(Step((*parts[0].chunks, *parts[1].chunks)))
    return steps


def _sharing(model: Path, vocab_size: int) -> Sharing:
    """How much a prefill and a decode worker of `tandem serve` slow each other: everything that serving does, too."""
    return uvloop.run(_served_sharing(model, vocab_size))


async def _served_sharing(model: Path, vocab_size: int) -> Sharing:
    async with tandem_turns(model, Server(TANDEM_SERVERS[DISAGGREGATED])) as turn, turn() as client:
        await warm_up(client, vocab_size)
        return await measure_sharing(client, vocab_size)


async def measure_sharing(client: StreamClient, vocab_size: int) -> Sharing:
    """Of a server with one prefill and one decode worker: prompts alone, streams alone, then both at once."""
    rng = random.Random(0)

    async def prompts() -> list[Stream]:
        """Sends the prompts one after the other; second tokens are not used."""
        texts = fresh_prompts(rng, _SHARED_PROMPTS, _SHARED_PROMPT_TOKENS, vocab_size)
        return [await client.generate(text, 1) for text in texts]

    async def streams() -> list[asyncio.Task[Stream]]:
        """That have all begun to decode."""
        begun = asyncio.Semaphore(0)
        texts = fresh_prompts(rng, _SHARED_STREAMS, _SHARED_CONTEXT, vocab_size)
        tasks = [asyncio.create_task(client.generate(text, _SHARED_TOKENS, begun.release)) for text in texts]
        for _ in tasks:
            await begun.acquire()
        return tasks

    prompts_alone = await prompts()
    streams_alone = await asyncio.gather(*await streams())
    running = await streams()
    prompts_beside = await prompts()
    streams_beside = await asyncio.gather(*running)
    return sharing_of(prompts_alone, prompts_beside, streams_alone, streams_beside)


def sharing_of(
    prompts_alone: Sequence[Stream],
    prompts_beside: Sequence[Stream],
    streams_alone: Sequence[Stream],
    streams_beside: Sequence[Stream],
) -> Sharing:
    """By medians; of the gaps, those within the time in which the other kind was under way. At least 1."""
    begin_s = max(each.sent_s + each.ttft_s for each in streams_beside)
    end_s = min(each.end_s for each in streams_beside)
    among = [each for each in prompts_beside if begin_s <= each.sent_s and each.end_s <= end_s]
    if not among:
        raise RuntimeError("no prompt was computed while all streams ran")
    alone_from_s = max(each.sent_s + each.ttft_s for each in streams_alone)
    gaps_s = [gap for each in streams_alone for gap in each.gaps_s(alone_from_s)]
    gaps_beside_s = [gap for each in streams_beside for gap in each.gaps_s(among[0].sent_s, among[-1].end_s)]
    return Sharing(
        decode=max(1.0, statistics.median(gaps_beside_s) / statistics.median(gaps_s)),
        prompt=max(
            1.0,
            statistics.median(each.ttft_s for each in among) / statistics.median(each.ttft_s for each in prompts_alone),
        ),
    )


@contextmanager
def _bound(cores: Sequence[int]) -> Iterator[None]:
    """This thread, and those that it starts, run on `cores` only."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def fleet_of(text: str) -> Fleet:
    """Reads `2P3D`, `4 auto`, `4 colocated`. Raises ArgumentTypeError."""
    if found := re.fullmatch(r"(\d+)[pP](\d+)[dD]", text):
        return Fleet(Policy.STATIC, decodes=int(found[2]), prefills=int(found[1]))
    if found := re.fullmatch(r"(\d+) ?(auto|colocated)", text):
        return Fleet(Policy(found[2]), int(found[1]))
    raise argparse.ArgumentTypeError(f"{text!r} is not xPyD, 'N auto' or 'N colocated'")


def trace_of(name: str, count: int, seed: int) -> MakeTrace:
    """By name, or of a file. Raises ConfigError."""
    if name == "poisson":
        return lambda rate: independent(*CHAT_ALONE, rate, count, seed)
    if name == "bursty":
        return lambda rate: independent(*CHAT_ALONE, rate, count, seed, _VARIATION)
    if name in DIALOGUES:
        return lambda rate: conversation(DIALOGUES[name], rate, count, seed)
    return partial(at_rate, read_jsonl(Path(name))[:count])


def _simulate(args: argparse.Namespace) -> None:
    failures = Failures(args.lose_every, args.back_after) if args.lose_every else None
    setup = Setup(args.fleet, read_costs(args.cost_model), failures, seed=args.seed)
    slo, make = Slo(args.ttft, args.itl), trace_of(args.trace, args.requests, args.seed)
    rate = highest_rate(setup, make, slo, args.rate) if args.search else args.rate
    if rate == 0:
        print("no rate passes")
        return
    result = simulate(setup, make(rate))
    document = {"fleet": args.fleet.name, "rate_per_s": rate, **result.document(slo)}
    for name, value in document.items():
        print(f"{name:15} {json.dumps(value)}")
    _write(args.json, document)


def _calibrate(args: argparse.Namespace) -> None:
    costs, fitted = calibrate(args.calibrate, args.threads, device=args.device)
    costs.write(args.cost_model)
    print(json.dumps(costs.document(), indent=2))
    print(f"median error of a step: {fitted.median_error:.1%}", file=sys.stderr)


def _write(path: Path | None, document: object) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", type=Path, metavar="MODEL", help="fit --cost-model to this machine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cost-model", type=Path, required=True, metavar="FILE")
    parser.add_argument("--fleet", type=fleet_of, default=Fleet(Policy.AUTO, 2))
    parser.add_argument("--trace", default="poisson", help="poisson, bursty, conversation, agentic, or a file")
    parser.add_argument("--rate", type=float, default=1.0, metavar="PER_S", help="of requests; where --search begins")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ttft", type=float, default=2.0, metavar="S", help="objective for the first token")
    parser.add_argument("--itl", type=float, default=0.1, metavar="S", help="objective between tokens, 95th percentile")
    parser.add_argument("--search", action="store_true", help="the highest rate at which 90 %% attain both")
    parser.add_argument("--lose-every", type=float, metavar="S", help="lose a worker")
    parser.add_argument("--back-after", type=float, default=30.0, metavar="S")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    """Prints what was asked for."""
    args = _arguments()
    if args.calibrate:
        _calibrate(args)
    else:
        _simulate(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
