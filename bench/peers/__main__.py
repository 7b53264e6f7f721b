"""Tandem on a CPU against transformers and vLLM, in one run: `python -m bench.peers [--vllm-python PATH]`.

The same checkpoint, threads, prompts and work for all; engines take turns, so that the machine's
drift hits all alike, and ratios hold where absolute times do not. Four parts: decode steps and
prefill of the engines alone (`bench.peers.engines`), servers (`bench.peers.served`), and what long
prompts do to decoding streams (`bench.interference`). Prints tables, the roofline of each phase and
the bars; writes `bench/results/peers.json` and renders docs/performance.md. Takes about ten minutes.

vLLM runs in an environment of its own, since its requirements are not Tandem's. `make peers-venv`
makes it in `../vllm-venv`: vLLM's CPU build and its requirements without the three packages for
sound and pictures, which nothing here needs; `make peers` uses it. Where the system has tcmalloc (Debian:
`apt-get install libtcmalloc-minimal4`), vLLM is given it, as its guide for CPUs says.
Without `--vllm-python` its columns stay empty.

How vLLM is timed: its engine in the driver's own process, no core process between, each call of
`step()` by itself; only steps in which every seq decodes count (see `bench.peers.vllm_engine`). transformers
is timed between tokens of one `generate` call. Tandem's steps go through its engine thread.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import uvloop

from bench import interference
from bench.ceilings import Ceilings, measure_ceilings
from bench.interference import DISAGGREGATED, BurstShape
from bench.peers.bars import (
    OURS,
    VLLM,
    Roof,
    bars,
    decode_documents,
    interference_documents,
    prefill_documents,
    served_documents,
)
from bench.peers.engines import BUDGETS, WORKLOADS, JobEngine, Results, agreement, run_round, warm_up
from bench.peers.model import PEER_SHAPES, PeerShape, write_checkpoint
from bench.peers.page import section
from bench.peers.process import EngineProcess, PeerError, closing_all, end_in_order, engine_process
from bench.peers.served import TANDEM_SERVERS, VLLM_SERVER, ServedShape, open_servers
from bench.peers.served import measure as measure_served
from bench.record import write_record
from models.config import load_model_config
from tandem.cores import usable_cores

NO_VLLM = "no vLLM venv given"
VLLM_SERVER_NAME = "vllm server"
RECORDED = {"135m": "peers", "0.6b": "peers-0.6b"}
"""Stem of the record, by shape."""
_CEILINGS_BUDGET_S = 0.3
_SMOKE_TOKENS = 1500
"""Of a stream of the smoke shape, which would otherwise end before the long prompts come."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run is to do."""

    shape: PeerShape
    cores: tuple[int, ...]
    rounds: int
    served_rounds: int
    vllm_python: Path | None
    served: ServedShape
    burst: BurstShape

    def settings(self) -> dict[str, Any]:
        """For the record."""
        return {
            "shape": self.shape.name,
            "sizes": dict(self.shape.sizes),
            "threads": len(self.cores),
            "rounds": self.rounds,
            "served_rounds": self.served_rounds,
            "step_budgets": {name: list(budgets) for name, budgets in BUDGETS.items()},
            "tandem_servers": {name: list(options) for name, options in TANDEM_SERVERS.items()},
            "served": asdict(self.served),
            "burst": asdict(self.burst),
        }


class Comparison:
    """One run: the engines that are still there, what was measured, and who was not, with the reason."""

    def __init__(self, plan: Plan, model: Path) -> None:
        self._plan = plan
        self._model = model
        self._ceilings: list[Ceilings] = []
        self._results: Results = {}
        self._facts: dict[str, dict[str, str]] = {}
        self._not_measured: dict[str, str] = {}
        if plan.vllm_python is None:
            self._not_measured[VLLM] = NO_VLLM

    def run(self) -> dict[str, Any]:
        """All parts; returns the record's results. Raises PeerError only if Tandem's own engine fails."""
        if self._plan.rounds:
            self._run_engines()
        self._measure_ceilings()
        roof = Roof(_highest(self._ceilings), load_model_config(self._model), torch.bfloat16)
        served, burst = uvloop.run(self._run_servers())
        decode = decode_documents(WORKLOADS, self._results, roof)
        prefill = prefill_documents(WORKLOADS, self._results, roof)
        agreements = {name: agreement(self._results, OURS, name) for name in self._facts if name != OURS}
        return {
            "settings": self._plan.settings(),
            "engines": self._facts,
            "not_measured": self._not_measured,
            "first_tokens_equal": {name: share for name, share in agreements.items() if share is not None},
            "ceilings": asdict(roof.ceilings),
            "decode": decode,
            "prefill": prefill,
            "served": served,
            "interference": burst,
            "bars": [bar.document() for bar in bars(decode, prefill, served, burst)],
        }

    def _measure_ceilings(self) -> None:
        """Once more: a machine with neighbours shows its ceilings only now and then."""
        self._ceilings.append(measure_ceilings(torch.device("cpu"), len(self._plan.cores), _CEILINGS_BUDGET_S))

    def _run_engines(self) -> None:
        names = [name for name in BUDGETS if name not in self._not_measured]
        engines = [engine_process(name, self._model, self._plan.cores, self._plan.vllm_python) for name in names]
        with closing_all(engines):
            running = [engine for engine in engines if self._opens(engine)]

            def lose(engine: JobEngine, error: PeerError) -> None:
                self._lose(engine.name, error)
                running[:] = [each for each in running if each is not engine]

            for number in range(self._plan.rounds):
                self._measure_ceilings()
                _say(f"engines, round {number + 1} of {self._plan.rounds}")
                run_round(running, WORKLOADS, number, self._results, lose)

    def _opens(self, engine: EngineProcess) -> bool:
        """Whether it can be measured."""
        _say(f"{engine.name} loads")
        try:
            engine.wait_open()
            warm_up(engine)
        except PeerError as error:
            self._lose(engine.name, error)
            return False
        self._facts[engine.name] = engine.facts
        return True

    def _lose(self, name: str, error: PeerError) -> None:
        """Notes why a peer is not measured any more; raises if it is Tandem itself."""
        if name == OURS:
            raise error
        print(f"{name}: {error}", file=sys.stderr)
        self._not_measured[name] = str(error).split("\n", maxsplit=1)[0]

    async def _run_servers(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Served and interference documents; if vLLM's server fails, those of Tandem alone."""
        if not self._plan.served_rounds:
            return {}, {}
        try:
            return await self._measure_servers(self._plan.vllm_python)
        except PeerError as error:
            if self._plan.vllm_python is None:
                raise
            self._lose(VLLM_SERVER_NAME, error)
            return await self._measure_servers(None)

    async def _measure_servers(self, vllm_python: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
        plan, vocab_size = self._plan, self._plan.shape.sizes["vocab_size"]
        _say("servers start")
        async with open_servers(self._model, tuple(TANDEM_SERVERS), plan.cores, vllm_python) as turns:
            _say("served")
            served = await measure_served(turns, plan.served, vocab_size, plan.served_rounds)
            _say("interference")
            rivals = {name: turn for name, turn in turns.items() if name in (DISAGGREGATED, VLLM_SERVER)}
            burst = await interference.measure(rivals, plan.burst, vocab_size, plan.served_rounds)
        return served_documents(served), interference_documents(burst)


def _say(what: str) -> None:
    print(f"{what} …", file=sys.stderr, flush=True)


def _highest(measured: Sequence[Ceilings]) -> Ceilings:
    """What the machine once reached, it can."""
    return replace(
        measured[0],
        read_gb_s=max(each.read_gb_s for each in measured),
        copy_gb_s=max(each.copy_gb_s for each in measured),
        bf16_tflop_s=max(each.bf16_tflop_s for each in measured),
        f32_tflop_s=max(each.f32_tflop_s for each in measured),
    )


def _plan(args: argparse.Namespace) -> Plan:
    """Binds this process, and so all that it starts, to the cores that are compared on."""
    cores = usable_cores()[: args.threads]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    shape = PEER_SHAPES[args.shape]
    burst = BurstShape(output_tokens=_SMOKE_TOKENS) if shape.name == "smoke" else BurstShape()
    return Plan(shape, cores, args.rounds, args.served_rounds, args.vllm_python, ServedShape(), burst)


def main() -> int:
    """Prints the section; writes record and page unless told not to, or for the smoke shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, help="python of vLLM's environment, as `make peers-venv` makes it")
    parser.add_argument("--shape", choices=sorted(PEER_SHAPES), default="135m")
    parser.add_argument("--threads", type=int, default=2, help="cores, and threads of each engine")
    parser.add_argument("--rounds", type=int, default=3, help="of the engines; 0 = none of them")
    parser.add_argument("--served-rounds", type=int, default=2, help="of the servers; 0 = none of them")
    parser.add_argument("--no-record", action="store_true", help="only print")
    args = parser.parse_args()
    end_in_order()
    plan = _plan(args)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(plan.shape, Path(folder))
        results = Comparison(plan, Path(folder)).run()
    print("\n".join(section(results)))
    if not args.no_record and plan.shape.name in RECORDED:
        write_record(RECORDED[plan.shape.name], results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
