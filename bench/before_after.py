"""Two checkouts against each other on one machine: `python -m bench.before_after BASE_DIR [--rounds 20]`.

BASE_DIR is an installed checkout (`make install`); this checkout is the other side. Both sides are up at once and
do the same work in turns, round after round, and the side that begins changes, so that the machine's drift hits both
alike. Every few rounds all processes are started anew. Every figure is a cost, so that less is better:

    engine          decode steps and prompts of the engine alone, by each side's own `bench.peers.tandem_engine`
    tandem …        `tandem serve` of each deployment, over gRPC by this checkout's client: the first token and the gaps
                    of a request alone, the time per token of all streams at once
    control loop    64 streams on a tiny model, where what is not the model counts most: gap, CPU time per token of the
                    router and of the decode worker, the engine's step and its idle share, by the workers' own metrics

Prints each figure's medians and the geometric mean of the rounds' ratios, after by before, with its 95 % interval, and
writes `bench/results/before-after.json`. Twenty rounds take about twelve minutes on two cores where nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from bench.peers.job import Job
from bench.peers.process import EngineProcess, PeerProcess, closing_all, end_in_order
from bench.peers.servers import TANDEM_SERVERS, Served, ServedShape, measure_turn, warm_up, with_pool
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from bench.support.cluster import Cluster, serve
from bench.support.machine import RESULTS, describe_machine, today
from bench.support.markdown import table
from bench.support.pairs import paired_ratio
from bench.support.processes import children
from bench.support.scrape import worker_counters
from bench.support.streams import Stream, TandemStreams, fresh_prompts, tokens_per_s
from tandem.client import AsyncClient

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("before", "after")
_THREADS = 2
_READY_S = 90.0
_SETTLE_S = 0.3
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STEP = "tandem_step_seconds"
LOOP = "control loop"
_LOOP_MODEL = "smoke"

Figures = dict[str, float]
"""By name, the unit in it; less is better."""


@dataclass(frozen=True, slots=True)
class Work:
    """How much a round does."""

    shape: str
    """One of `PEER_SHAPES`, of all but the control loop."""
    jobs: tuple[Job, ...]
    served: ServedShape
    loop_streams: int
    loop_tokens: int


def _job(num_seqs: int, prompt_tokens: int, decode_steps: int) -> Job:
    return Job(num_seqs, prompt_tokens, decode_steps, budget_tokens=2048, seed=num_seqs)


_WARM_UP = _job(4, 192, 4)
FULL = Work(
    "135m", (_job(1, 256, 24), _job(16, 128, 16), _job(64, 64, 10)), ServedShape(16, 128, 32, alone_repeats=2), 64, 96
)
QUICK = Work("smoke", (_job(1, 64, 8), _job(16, 64, 8)), ServedShape(4, 64, 16, alone_repeats=1), 8, 32)


@dataclass(slots=True)
class Side:
    """One checkout's processes, up and warm."""

    engine: EngineProcess
    servers: dict[str, AsyncClient] = field(default_factory=dict)
    """Clients by deployment."""
    loop: Cluster | None = None
    """That of the control loop."""

    async def measure(self, work: Work, number: int) -> Figures:
        """Everything, once."""
        found = self._steps(work)
        for name, client in self.servers.items():
            await asyncio.sleep(_SETTLE_S)
            if name == LOOP:
                found |= await self._control_loop(client, work, number)
            else:
                served = Served()
                vocab_size = PEER_SHAPES[work.shape].sizes["vocab_size"]
                await measure_turn(TandemStreams(client), work.served, vocab_size, number, served)
                found |= {
                    f"{name}: first token alone, ms": statistics.median(served.alone_ttft_s) * 1e3,
                    f"{name}: gap alone, ms": statistics.median(served.alone_gap_s) * 1e3,
                    f"{name}: gap of all streams, ms": statistics.median(served.gap_s) * 1e3,
                    f"{name}: all streams, ms per token": 1e3 / served.tokens_per_s[0],
                }
        return found

    def _steps(self, work: Work) -> Figures:
        found: Figures = {}
        for job in work.jobs:
            times, name = self.engine.run(job), f"{job.num_seqs} × {job.prompt_tokens}"
            found[f"engine: decode step {name}, ms"] = statistics.median(times.step_s) * 1e3
            found[f"engine: prompts {name}, µs per token"] = times.prefill_s / (job.num_seqs * job.prompt_tokens) * 1e6
        return found

    async def _control_loop(self, client: AsyncClient, work: Work, number: int) -> Figures:
        """Streams at once, with what each process and the engine spent on them."""
        assert self.loop is not None
        admin = (await client.status()).admin_address
        pids = children(self.loop.process.pid)
        prompts = fresh_prompts(
            random.Random(number), work.loop_streams, 16, PEER_SHAPES[_LOOP_MODEL].sizes["vocab_size"]
        )
        counted = await asyncio.to_thread(worker_counters, admin)
        before_s = {name: _cpu_s(pid) for name, pid in pids.items()}
        streams = await _all_at_once(client, prompts, work.loop_tokens)
        spent_s = {name: _cpu_s(pid) - before_s[name] for name, pid in pids.items()}
        counted = (await asyncio.to_thread(worker_counters, admin)) - counted
        num_tokens = sum(stream.num_tokens for stream in streams)
        found = {
            f"{LOOP}: all streams, ms per token": 1e3 / tokens_per_s(streams),
            f"{LOOP}: gap, ms": statistics.median(gap for stream in streams for gap in stream.gaps_s()) * 1e3,
            **{f"{LOOP}: CPU of {name}, µs per token": each / num_tokens * 1e6 for name, each in spent_s.items()},
        }
        steps, step_s = counted[f"{_STEP}_count{{decode}}"], counted[f"{_STEP}_sum{{decode}}"]
        if steps:
            span_s = max(each.end_s for each in streams) - min(each.sent_s for each in streams)
            found[f"{LOOP}: decode step, ms"] = step_s / steps * 1e3
            found[f"{LOOP}: not in a decode step, share of the time"] = max(0.0, 1 - step_s / span_s)
        return found


async def _all_at_once(client: AsyncClient, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> list[Stream]:
    return await asyncio.gather(*(TandemStreams(client).generate(prompt, num_tokens) for prompt in prompts))


def _cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@contextlib.asynccontextmanager
async def open_side(checkout: Path, models: dict[str, Path], work: Work) -> AsyncIterator[Side]:
    """Starts the checkout's engine and servers; ends them when the block ends. Raises PeerError, RuntimeError."""
    python = Path(sys.executable) if checkout == ROOT else checkout / ".venv" / "bin" / "python"
    command = (str(python), "-m", "bench.peers.tandem_engine", str(models[work.shape]), str(_THREADS))
    process = PeerProcess(checkout.name, command, {"PYTHONPATH": str(checkout)}, checkout)
    async with contextlib.AsyncExitStack() as stack:
        side = Side(EngineProcess(process))
        stack.enter_context(closing_all([process]))
        side.engine.wait_open()
        side.engine.run(_WARM_UP)
        for name, options in {**TANDEM_SERVERS, LOOP: ("--max-seqs", str(work.loop_streams))}.items():
            model = models[_LOOP_MODEL if name == LOOP else work.shape]
            started = serve(str(model), *with_pool(options), checkout=checkout)
            cluster = await asyncio.to_thread(stack.enter_context, started)
            client = side.servers[name] = await stack.enter_async_context(AsyncClient(cluster.target))
            await client.wait_ready(timeout_s=_READY_S)
            await warm_up(TandemStreams(client), PEER_SHAPES[_LOOP_MODEL].sizes["vocab_size"])
            if name == LOOP:
                side.loop = cluster
        yield side


async def measure(
    checkouts: Sequence[Path], models: dict[str, Path], work: Work, rounds: int, each_start: int
) -> dict[str, list[Figures]]:
    """All rounds by side; processes are started anew after `each_start` of them."""
    found: dict[str, list[Figures]] = {side: [] for side in SIDES}
    for first in range(0, rounds, each_start):
        async with contextlib.AsyncExitStack() as stack:
            _say("both sides start")
            sides = [await stack.enter_async_context(open_side(each, models, work)) for each in checkouts]
            for number in range(first, min(rounds, first + each_start)):
                began_s = time.monotonic()
                for index in (0, 1) if number % 2 == 0 else (1, 0):
                    found[SIDES[index]].append(await sides[index].measure(work, number + 1))
                _say(f"round {number + 1} of {rounds}: {time.monotonic() - began_s:.0f} s")
    return found


def ratios(rounds: dict[str, list[Figures]]) -> dict[str, dict[str, Any]]:
    """Of every figure that both sides have in all rounds: medians and the paired ratio; `met` against `limit`."""
    before, after = (rounds[side] for side in SIDES)
    names = [name for name in before[0] if all(name in each for each in (*before, *after))]
    found = {}
    for name in names:
        pair = [each[name] for each in before], [each[name] for each in after]
        ratio = paired_ratio(*pair)
        medians = {side: statistics.median(values) for side, values in zip(SIDES, pair, strict=True)}
        found[name] = {**medians, "ratio": None if ratio is None else asdict(ratio)}
    return found


def as_markdown(found: dict[str, dict[str, Any]]) -> str:
    """A row per figure."""
    rows = []
    for name, each in found.items():
        ratio = each["ratio"]
        cells = ("–", "–") if ratio is None else (f"{ratio['mean']:.3f}", f"{ratio['low']:.3f} to {ratio['high']:.3f}")
        rows.append((name, *(f"{each[side]:.4g}" for side in SIDES), *cells))
    return table(("figure, median", *SIDES, "after / before", "95 % interval"), rows)


def _revision(checkout: Path) -> str:
    """Commit, with `-dirty` if files differ from it."""
    command = ("git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _on_models(shapes: set[str], run: Callable[[dict[str, Path]], Any]) -> Any:
    """What `run` returns for checkpoints of these shapes."""
    with tempfile.TemporaryDirectory() as folder:
        models = {name: Path(folder) / name for name in shapes}
        for name, model in models.items():
            model.mkdir()
            write_checkpoint(PEER_SHAPES[name], model)
        return run(models)


def main() -> int:
    """Measures, prints, records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, metavar="BASE_DIR")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rounds-each-start", type=int, default=5, help="rounds until all processes start anew")
    parser.add_argument("--quick", action="store_true", help="only shows that everything runs; records nothing")
    parser.add_argument("--out", type=Path, help="instead of bench/results/before-after.json")
    args = parser.parse_args()
    end_in_order()
    work = QUICK if args.quick else FULL
    checkouts = (args.base.resolve(), ROOT)
    rounds = 2 if args.quick else args.rounds
    found = _on_models(
        {work.shape, _LOOP_MODEL},
        lambda models: uvloop.run(measure(checkouts, models, work, rounds, args.rounds_each_start)),
    )
    record = {
        "date": today(),
        "machine": describe_machine(),
        "revisions": {side: _revision(each) for side, each in zip(SIDES, checkouts, strict=True)},
        "figures": ratios(found),
        "rounds": found,
    }
    print(as_markdown(record["figures"]))
    out = args.out or (None if args.quick else RESULTS / "before-after.json")
    if out is not None:
        out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
