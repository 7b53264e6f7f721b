"""Tandem on a CPU against vLLM, llama.cpp and transformers, in one run: `python -m bench.peers [--vllm-python PATH] …`.

The same checkpoint, threads, prompts and work for all; engines take turns, so that the machine's drift hits all alike,
and ratios hold where absolute times do not. Parts, all of them unless `--parts` names some: `engines` (decode steps and
prefill of the engines alone), `quantized` (the same of quantised weights and KV), `served` (servers, and what long
prompts do to decoding streams). A run of all parts writes `bench/results/peers-<shape>-<tier>.json`, unless a tier is
forced; `python -m bench.report` renders it. That takes about 25 minutes; `--quick`, a round of half the steps without
transformers, about 9.

Peers run in environments of their own, since their requirements are not Tandem's: `make peers-venv` makes them beside
the repository, `make peers` uses them. vLLM: its CPU build and its requirements without the three packages for sound
and pictures, which nothing here needs. llama.cpp: llama-cpp-python, built
from source for this processor, on GGUF files of the same weights (`bench.peers.gguf_files`). Where the system has
tcmalloc (Debian: `apt-get install libtcmalloc-minimal4`), vLLM is given it, as its guide for CPUs says.

How vLLM is timed: its engine in the driver's own process, no core process between, each call of
`step()` by itself; only steps in which every seq decodes count (see `bench.peers.vllm_engine`). transformers
is timed between tokens of one `generate` call. Tandem's steps go through its engine thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from bench.peers.burst import Burst, BurstShape, burst_shape, measure_burst
from bench.peers.contenders import CONTENDERS, OURS, PLAIN, QUANTIZED, TRANSFORMERS, Contender, Environments
from bench.peers.engines import (
    QUANTIZED_WORKLOADS,
    WORKLOADS,
    JobEngine,
    Measured,
    Results,
    Workload,
    agreement,
    run_round,
    warm_up,
)
from bench.peers.process import EngineProcess, PeerError, closing_all, end_in_order, engine_process, write_gguf_files
from bench.peers.servers import (
    DISAGGREGATED,
    TANDEM_SERVERS,
    VLLM_SERVER,
    Served,
    ServedShape,
    Server,
    measure_turn,
    open_servers,
    take_turns,
)
from bench.support.checkpoints import PEER_SHAPES, PeerShape, write_checkpoint
from bench.support.machine import cpu_tier, write_record
from bench.support.streams import StreamClient
from kernels.cpu.tiers import TIERS
from shell.cores import usable_cores

PARTS = ("engines", "quantized", "served")


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run is to do."""

    shape: PeerShape
    cores: tuple[int, ...]
    parts: frozenset[str]
    rounds: int
    quick: bool
    cpu_tier: str | None
    """Forced on ours; None = the highest."""
    environments: Environments
    served: ServedShape
    burst: BurstShape

    @property
    def tier(self) -> str:
        """Of our kernels."""
        return self.cpu_tier or cpu_tier()

    @property
    def record(self) -> str | None:
        """Stem of the record; None for a run that is not whole."""
        whole = self.parts == frozenset(PARTS) and self.shape.name != "smoke" and self.cpu_tier is None
        return f"peers-{self.shape.name}-{self.tier}" if whole else None

    def shortened(self, workloads: Sequence[Workload]) -> tuple[Workload, ...]:
        """As a quick run has them: half the steps."""
        if not self.quick:
            return tuple(workloads)
        return tuple(replace(each, decode_steps=each.decode_steps // 2) for each in workloads)

    def settings(self) -> dict[str, Any]:
        """For the record."""
        return {
            "shape": self.shape.name,
            "sizes": dict(self.shape.sizes),
            "tier": self.tier,
            "threads": len(self.cores),
            "rounds": self.rounds,
            "quick": self.quick,
            "step_budgets": {name: list(each.budgets) for name, each in CONTENDERS.items()},
            "tandem_servers": {name: list(options) for name, options in TANDEM_SERVERS.items()},
            "served": asdict(self.served),
            "burst": asdict(self.burst),
        }


class Comparison:
    """One run: what was measured, and who was not, with the reason."""

    def __init__(self, plan: Plan, model: Path) -> None:
        self._plan = plan
        self._model = model
        self._facts: dict[str, dict[str, str]] = {}
        self._not_measured: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        """All parts of the plan; returns the record's results. Raises PeerError only if Tandem's own engine fails."""
        plain: Results = {}
        quantized: Results = {}
        if "engines" in self._plan.parts:
            left_out = {TRANSFORMERS} if self._plan.quick else set()
            self._run_engines([each for each in PLAIN if each not in left_out], WORKLOADS, plain)
        if "quantized" in self._plan.parts:
            self._run_engines(QUANTIZED, QUANTIZED_WORKLOADS, quantized)
        served, burst = uvloop.run(self._run_servers())
        agreements = {name: agreement(plain, OURS, name) for name in self._facts if name != OURS}
        return {
            "settings": self._plan.settings(),
            "engines": self._facts,
            "not_measured": self._not_measured,
            "first_tokens_equal": {name: share for name, share in agreements.items() if share is not None},
            "decode": step_documents(WORKLOADS, plain) if plain else [],
            "prefill": prefill_documents(WORKLOADS, plain) if plain else [],
            "quantized": step_documents(QUANTIZED_WORKLOADS, quantized) if quantized else [],
            "served": served_documents(served),
            "interference": {name: each.document() for name, each in burst.items()},
        }

    def _run_engines(self, names: Sequence[str], workloads: Sequence[Workload], results: Results) -> None:
        """Adds to `results` what each engine takes that has an environment; all are up at once."""
        absent = self._plan.environments.absent()
        self._not_measured |= {name: absent[name] for name in names if name in absent}
        names = [name for name in names if name not in absent]
        self._write_gguf_files(names)
        with contextlib.ExitStack() as stack:
            running = [engine for name in names if (engine := self._open(name, stack)) is not None]

            def lose(engine: JobEngine, error: PeerError) -> None:
                self._lose(engine.name, error)
                running[:] = [each for each in running if each is not engine]

            for number in range(self._plan.rounds):
                _say(f"{', '.join(each.name for each in running)}: round {number + 1} of {self._plan.rounds}")
                run_round(running, self._plan.shortened(workloads), number, results, lose)

    def _write_gguf_files(self, names: Sequence[str]) -> None:
        wanted = [CONTENDERS[name].options["file_type"] for name in names if CONTENDERS[name].program == "llama"]
        try:
            write_gguf_files(self._model, self._plan.environments, wanted)
        except PeerError as error:  # the engines will say so, too
            print(error, file=sys.stderr)

    def _open(self, name: str, stack: contextlib.ExitStack) -> EngineProcess | None:
        """The engine, warm, until `stack` closes; None if it cannot be measured."""
        _say(f"{name} loads")
        engine = engine_process(self._contender(name), self._model, self._plan.cores, self._plan.environments)
        stack.enter_context(closing_all([engine]))
        try:
            engine.wait_open()
            warm_up(engine)
        except PeerError as error:
            self._lose(name, error)
            return None
        self._facts[name] = {**engine.facts, "resident_mb": f"{engine.resident_bytes / 1e6:.0f}"}
        return engine

    def _contender(self, name: str) -> Contender:
        """With the tier that is forced on ours."""
        contender, tier = CONTENDERS[name], self._plan.cpu_tier
        if contender.program != "tandem" or tier is None:
            return contender
        return replace(contender, options={**contender.options, "cpu_tier": tier})

    def _lose(self, name: str, error: PeerError) -> None:
        """Notes why a peer is not measured any more; raises if it is Tandem itself."""
        if name == OURS:
            raise error
        print(f"{name}: {error}", file=sys.stderr)
        self._not_measured[name] = error.cause

    async def _run_servers(self) -> tuple[dict[str, Served], dict[str, Burst]]:
        """What was served, and the bursts; if vLLM's server fails, those of Tandem alone."""
        if "served" not in self._plan.parts:
            return {}, {}
        try:
            return await self._measure_servers(self._plan.environments.vllm_python)
        except PeerError as error:
            if self._plan.environments.vllm_python is None:
                raise
            self._lose(f"{VLLM_SERVER} server", error)
            return await self._measure_servers(None)

    async def _measure_servers(self, vllm_python: Path | None) -> tuple[dict[str, Served], dict[str, Burst]]:
        plan, vocab_size = self._plan, self._plan.shape.sizes["vocab_size"]
        served: dict[str, Served] = {}
        bursts: dict[str, Burst] = {}

        async def one(name: str, client: StreamClient, number: int) -> None:
            await measure_turn(client, plan.served, vocab_size, number + 1, served.setdefault(name, Served()))
            if name in (DISAGGREGATED, VLLM_SERVER):
                await measure_burst(client, plan.burst, vocab_size, number + 1, bursts.setdefault(name, Burst()))

        _say("servers")
        tandem = {name: Server(options) for name, options in TANDEM_SERVERS.items()}
        async with open_servers(self._model, tandem, plan.cores, vllm_python) as turns:
            await take_turns(turns, plan.rounds, one, vocab_size)
        return served, bursts


Document = dict[str, Any]


def step_documents(workloads: Sequence[Workload], results: Results) -> list[Document]:
    """One per workload: each engine's step in ms."""
    return [
        {
            "workload": workload.name,
            "step_ms": {name: _step_ms(each) for name, each in results.get(workload.name, {}).items() if each.step_s},
        }
        for workload in workloads
    ]


def prefill_documents(workloads: Sequence[Workload], results: Results) -> list[Document]:
    """One per workload that compares prefill: tokens/s of each engine by step budget."""
    return [
        {
            "workload": each.name,
            "tokens_per_s": {
                name: _prefill(name, measured, each.num_prompt_tokens)
                for name, measured in results.get(each.name, {}).items()
            },
        }
        for each in workloads
        if each.compares_prefill
    ]


def served_documents(served: Mapping[str, Served]) -> Document:
    """By server."""
    return {
        name: {
            "tokens_per_s": {"median": statistics.median(each.tokens_per_s), "best": max(each.tokens_per_s)},
            "gap_ms_p50": _median_ms(each.gap_s),
            "alone_ttft_ms": {"median": _median_ms(each.alone_ttft_s), "best": min(each.alone_ttft_s) * 1e3},
            "alone_gap_ms_p50": _median_ms(each.alone_gap_s),
            "client_cpu_share": statistics.median(each.client_cpu_share),
        }
        for name, each in served.items()
    }


def _step_ms(measured: Measured) -> Document:
    return {
        "median": _median_ms(measured.step_s),
        "best": min(measured.step_s) * 1e3,
        "num_steps": len(measured.step_s),
    }


def _prefill(name: str, measured: Measured, num_tokens: int) -> Document:
    """`median` and `best` are those of the best budget."""
    by_budget = {
        budget: {"median": num_tokens / statistics.median(times), "best": num_tokens / min(times)}
        for budget, times in measured.prefill_s.items()
    }
    return {
        **by_budget[measured.best_budget],
        "best_budget": measured.best_budget,
        "default_budget": CONTENDERS[name].budgets[0],
        "by_budget": {str(budget or "all at once"): figures for budget, figures in by_budget.items()},
    }


def _median_ms(values_s: Sequence[float]) -> float:
    return statistics.median(values_s) * 1e3


def _say(what: str) -> None:
    print(f"{what} …", file=sys.stderr, flush=True)


def _plan(args: argparse.Namespace) -> Plan:
    """Binds this process, and so all that it starts, to the cores that are compared on."""
    cores = usable_cores()[: args.threads]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    shape = PEER_SHAPES[args.shape]
    return Plan(
        shape=shape,
        cores=cores,
        parts=frozenset(args.parts),
        rounds=args.rounds or (1 if args.quick else 3),
        quick=args.quick,
        cpu_tier=args.cpu_tier,
        environments=Environments(args.vllm_python, args.llama_python),
        served=ServedShape(),
        burst=burst_shape(shape.name),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, help="python of vLLM's environment, as `make peers-venv` makes it")
    parser.add_argument("--llama-python", type=Path, help="python of llama.cpp's environment, likewise")
    parser.add_argument("--shape", choices=sorted(PEER_SHAPES), default="135m")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; without it, all")
    parser.add_argument("--threads", type=int, default=2, help="cores, and threads of each engine")
    parser.add_argument("--rounds", type=int, help="of each part; default 3, of --quick 1")
    parser.add_argument("--quick", action="store_true", help="half the steps, without transformers")
    parser.add_argument("--cpu-tier", choices=TIERS, help="instructions of our own kernels; without it, the highest")
    parser.add_argument("--no-record", action="store_true", help="only print")
    return parser.parse_args()


def main() -> int:
    """Prints the results; writes the record after a whole run."""
    args = _arguments()
    end_in_order()
    plan = _plan(args)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(plan.shape, Path(folder))
        results = Comparison(plan, Path(folder)).run()
    print(json.dumps(results, indent=2))
    if plan.record is not None and not args.no_record:
        write_record(plan.record, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
