"""Tandem on a CPU against vLLM, llama.cpp and transformers, in one run: `python -m bench.peers [--vllm-python PATH] …`.

The same checkpoint, threads, prompts and work for all; engines take turns, so that the machine's drift hits all alike,
and ratios hold where absolute times do not. Parts, all of them unless `--parts` names some: `engines` (decode steps and
prefill of the engines alone, `bench.peers.engines`), `quantized` (the same of quantised weights and KV), `busy` (our
step beside a busy process, `bench.peers.busy`), `served` (servers, `bench.peers.served`, and what long prompts do to
decoding streams, `bench.interference`). Prints tables, the roofline of each phase and the bars. A run of all parts
writes `bench/results/peers-<shape>-<tier>.json` and renders docs/performance.md, unless a tier is forced.
That takes about 25 minutes; `--quick`, a round of half the steps without transformers, about 9.

Peers run in environments of their own, since their requirements are not Tandem's: `make peers-venv` makes them beside
the repository, `make peers` uses them. vLLM: its CPU build and its requirements without the three packages for sound
and pictures, which nothing here needs; AMD's zentorch for it in a folder of its own. llama.cpp: llama-cpp-python, built
from source for this processor, on GGUF files of the same weights (`bench.peers.gguf_files`). Where the system has
tcmalloc (Debian: `apt-get install libtcmalloc-minimal4`), vLLM is given it, as its guide for CPUs says. The columns of
a peer that is not there say so.

How vLLM is timed: its engine in the driver's own process, no core process between, each call of
`step()` by itself; only steps in which every seq decodes count (see `bench.peers.vllm_engine`). transformers
is timed between tokens of one `generate` call. Tandem's steps go through its engine thread.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import uvloop

from bench import interference
from bench.ceilings import Ceilings, measure_ceilings
from bench.interference import BurstShape, burst_shape
from bench.peers.bars import (
    Documents,
    Roof,
    bars,
    busy_documents,
    decode_documents,
    interference_documents,
    prefill_documents,
    served_documents,
    step_documents,
)
from bench.peers.busy import BUSY_WORKLOADS, BusyResults, measure_busy
from bench.peers.contenders import CONTENDERS, OURS, PLAIN, QUANTIZED, TRANSFORMERS, Contender, Environments
from bench.peers.engines import (
    QUANTIZED_WORKLOADS,
    WORKLOADS,
    Beside,
    JobEngine,
    Results,
    Workload,
    agreement,
    run_round,
    warm_up,
)
from bench.peers.page import section
from bench.peers.process import (
    EngineProcess,
    PeerError,
    closing_all,
    end_in_order,
    engine_process,
    write_gguf_files,
)
from bench.peers.served import DISAGGREGATED, TANDEM_SERVERS, VLLM_SERVER, ServedShape, open_servers
from bench.peers.served import measure as measure_served
from bench.record import write_record
from bench.support.checkpoints import PEER_SHAPES, PeerShape, write_checkpoint
from bench.support.machine import cpu_tier
from kernels.cpu.tiers import TIERS
from models.config import load_model_config
from shell.cores import usable_cores

VLLM_SERVER_NAME = "vllm server"
PARTS = ("engines", "quantized", "busy", "served")
_CEILINGS_BUDGET_S = 0.3
_ROUNDS, _SERVED_ROUNDS = 3, 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run is to do."""

    shape: PeerShape
    cores: tuple[int, ...]
    parts: frozenset[str]
    rounds: int
    served_rounds: int
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
            "served_rounds": self.served_rounds,
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
        self._ceilings: dict[str, list[Ceilings]] = {}
        """By workload: what the machine could do before and after each of our turns."""
        self._facts: dict[str, dict[str, str]] = {}
        self._not_measured: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        """All parts of the plan; returns the record's results. Raises PeerError only if Tandem's own engine fails."""
        plain: Results = {}
        quantized: Results = {}
        busy: BusyResults = {}
        if "engines" in self._plan.parts:
            left_out = {TRANSFORMERS} if self._plan.quick else set()
            engines = [each for each in PLAIN if each not in left_out]
            self._run_engines(engines, WORKLOADS, plain, self._measure_ceilings)
        if "quantized" in self._plan.parts:
            self._run_engines(QUANTIZED, QUANTIZED_WORKLOADS, quantized)
        if "busy" in self._plan.parts:
            self._run_busy(busy)
        roof = Roof(self._ceilings, load_model_config(self._model), torch.bfloat16)
        served, burst = uvloop.run(self._run_servers())
        found = Documents(
            decode=decode_documents(WORKLOADS, plain, roof) if plain else (),
            prefill=prefill_documents(WORKLOADS, plain, roof) if plain else (),
            quantized=step_documents(QUANTIZED_WORKLOADS, quantized) if quantized else (),
            busy=busy_documents(busy),
            served=served,
            interference=burst,
        )
        agreements = {name: agreement(plain, OURS, name) for name in self._facts if name != OURS}
        return {
            "settings": self._plan.settings(),
            "engines": self._facts,
            "not_measured": self._not_measured,
            "first_tokens_equal": {name: share for name, share in agreements.items() if share is not None},
            "ceilings": {name: [asdict(each) for each in beside] for name, beside in self._ceilings.items()},
            **{each.name: getattr(found, each.name) for each in fields(found)},
            "bars": [bar.document() for bar in bars(found)],
        }

    def _measure_ceilings(self, engine: JobEngine, workload: Workload) -> None:
        """Before and after our own turns: a machine with neighbours has others from minute to minute."""
        if engine.name == OURS:
            ceilings = measure_ceilings(torch.device("cpu"), len(self._plan.cores), _CEILINGS_BUDGET_S)
            self._ceilings.setdefault(workload.name, []).append(ceilings)

    def _run_engines(
        self,
        names: Sequence[str],
        workloads: Sequence[Workload],
        results: Results,
        beside: Beside = lambda engine, workload: None,
    ) -> None:
        """Adds to `results` what each of `names` that can be had takes; all are up at once."""
        names = self._available(names)
        self._write_gguf_files(names)
        with contextlib.ExitStack() as stack:
            running = [engine for name in names if (engine := self._open(name, stack)) is not None]

            def lose(engine: JobEngine, error: PeerError) -> None:
                self._lose(engine.name, error)
                running[:] = [each for each in running if each is not engine]

            for number in range(self._plan.rounds):
                _say(f"{', '.join(each.name for each in running)}: round {number + 1} of {self._plan.rounds}")
                run_round(running, self._plan.shortened(workloads), number, results, lose, beside)

    def _run_busy(self, results: BusyResults) -> None:
        with contextlib.ExitStack() as stack:
            engine = self._open(OURS, stack)
            assert engine is not None
            for number in range(self._plan.rounds):
                _say(f"beside a busy process: round {number + 1} of {self._plan.rounds}")
                measure_busy(engine, self._plan.shortened(BUSY_WORKLOADS), self._plan.cores, number, results)

    def _available(self, names: Sequence[str]) -> list[str]:
        """Those with an environment."""
        absent = self._plan.environments.absent()
        self._not_measured |= {name: absent[name] for name in names if name in absent}
        return [name for name in names if name not in absent]

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

    async def _run_servers(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Served and interference documents; if vLLM's server fails, those of Tandem alone."""
        if "served" not in self._plan.parts:
            return {}, {}
        try:
            return await self._measure_servers(self._plan.environments.vllm_python)
        except PeerError as error:
            if self._plan.environments.vllm_python is None:
                raise
            self._lose(VLLM_SERVER_NAME, error)
            return await self._measure_servers(None)

    async def _measure_servers(self, vllm_python: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
        plan, vocab_size = self._plan, self._plan.shape.sizes["vocab_size"]
        _say("servers start")
        async with open_servers(self._model, TANDEM_SERVERS, plan.cores, vllm_python) as turns:
            _say("served")
            served = await measure_served(turns, plan.served, vocab_size, plan.served_rounds)
            _say("interference")
            rivals = {name: turn for name, turn in turns.items() if name in (DISAGGREGATED, VLLM_SERVER)}
            burst = await interference.measure(rivals, plan.burst, vocab_size, plan.served_rounds)
        return served_documents(served), interference_documents(burst)


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
        rounds=args.rounds or (1 if args.quick else _ROUNDS),
        served_rounds=args.served_rounds or (1 if args.quick else _SERVED_ROUNDS),
        quick=args.quick,
        cpu_tier=args.cpu_tier,
        environments=Environments(args.vllm_python, args.llama_python, args.zentorch),
        served=ServedShape(),
        burst=burst_shape(shape.name),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, help="python of vLLM's environment, as `make peers-venv` makes it")
    parser.add_argument(
        "--llama-python", type=Path, help="python of llama.cpp's environment, as `make peers-venv` makes it"
    )
    parser.add_argument(
        "--zentorch", type=Path, help="folder with AMD's zentorch for vLLM, as `make peers-venv` makes it"
    )
    parser.add_argument("--shape", choices=sorted(PEER_SHAPES), default="135m")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; without it, all")
    parser.add_argument("--threads", type=int, default=2, help="cores, and threads of each engine")
    parser.add_argument("--rounds", type=int, help=f"of the engines; default {_ROUNDS}")
    parser.add_argument("--served-rounds", type=int, help=f"of the servers; default {_SERVED_ROUNDS}")
    parser.add_argument(
        "--quick", action="store_true", help="half the steps, without transformers; one round by default"
    )
    parser.add_argument("--cpu-tier", choices=TIERS, help="instructions of our own kernels; without it, the highest")
    parser.add_argument("--no-record", action="store_true", help="only print")
    return parser.parse_args()


def main() -> int:
    """Prints the section; writes record and page after a whole run, unless told not to."""
    args = _arguments()
    end_in_order()
    plan = _plan(args)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(plan.shape, Path(folder))
        results = Comparison(plan, Path(folder)).run()
    print("\n".join(section(results)))
    if plan.record is not None and not args.no_record:
        write_record(plan.record, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
