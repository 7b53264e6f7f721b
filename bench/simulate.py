"""Tandem on a simulated clock (see `simulator`): goodput, attainment and use of any deployment under any trace.

    python -m bench.simulate --cost-model FILE --fleet 2P3D --trace poisson --rate 4 --ttft 2 --itl 0.1 [--search]
    python -m bench.simulate --calibrate MODEL --threads 2 --cost-model FILE     fits FILE to this machine
    python -m bench.simulate --validate [--measured GOODPUT.json]                predicted against measured
    python -m bench.simulate --study                                             the study of docs/operations.md

A fleet is `xPyD`, `N colocated` or `N auto`. Traces: poisson, bursty, conversation, agentic, or a file of JSON lines
as Mooncake publishes them. With `--lose-every S` one worker is lost each S seconds, and back after `--back-after`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import partial
from pathlib import Path

from bench import simulate_study, simulate_validation
from bench.calibrate import calibrate
from bench.goodput_loads import LOADS
from bench.peers.served import AUTO, COLOCATED, DISAGGREGATED
from simulator.cluster import Failures, Fleet, Policy, Setup, simulate
from simulator.costs import read_costs
from simulator.outcomes import Slo
from simulator.sizing import highest_rate
from simulator.traces import MakeTrace, at_rate, conversation, independent, read_jsonl

_VARIATION = 3.0
"""Of the gaps of a bursty trace."""


def fleet_of(text: str) -> Fleet:
    """Reads `2P3D`, `4 auto`, `4 colocated`. Raises ArgumentTypeError."""
    if found := re.fullmatch(r"(\d+)[pP](\d+)[dD]", text):
        return Fleet(Policy.STATIC, decodes=int(found[2]), prefills=int(found[1]))
    if found := re.fullmatch(r"(\d+) ?(auto|colocated)", text):
        return Fleet(Policy(found[2]), int(found[1]))
    raise argparse.ArgumentTypeError(f"{text!r} is not xPyD, 'N auto' or 'N colocated'")


def trace_of(name: str, count: int, seed: int) -> MakeTrace:
    """By name, or of a file. Raises ConfigError."""
    mixed = simulate_study.CHAT_ALONE
    if name == "poisson":
        return lambda rate: independent(*mixed, rate, count, seed)
    if name == "bursty":
        return lambda rate: independent(*mixed, rate, count, seed, _VARIATION)
    if name in simulate_study.DIALOGUES:
        return lambda rate: conversation(simulate_study.DIALOGUES[name], rate, count, seed)
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


def _validate(args: argparse.Namespace) -> None:
    if args.measured:
        documents = [json.loads(each.read_text()) for each in args.measured]
        parts = [each.get("results", each) for each in documents]  # of a record, or what --json wrote
    else:
        record = json.loads(args.rates_of.read_text()) if args.rates_of else None
        rates = simulate_validation.carried(record.get("results", record)) if record else {}
        parts = [
            simulate_validation.measure(args.loads, args.servers, args.rate, args.requests, rates, args.arrivals_seed)
        ]
        _write(args.json, parts[0])
    if args.costs:
        costs = [read_costs(each) for each in args.costs]
    elif args.measured or args.json is None:
        threads = {each for _, each in simulate_validation.fleets(parts[0]["settings"]["threads"]).values()}
        costs = simulate_validation.costs_by_threads(threads)
    else:
        return
    print(simulate_validation.section([row for part in parts for row in simulate_validation.compare(part, costs)]))


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
    parser.add_argument("--validate", action="store_true", help="predicted against measured")
    parser.add_argument(
        "--measured", type=Path, nargs="+", metavar="FILE", help="what --json wrote, here or by bench.goodput"
    )
    parser.add_argument(
        "--costs", type=Path, nargs="+", metavar="FILE", help="of --validate, for 1 and 2 threads; default: measured"
    )
    parser.add_argument("--rates-of", type=Path, metavar="FILE", help="of --validate: rates that servers carried there")
    parser.add_argument("--arrivals-seed", type=int, help="of --validate; default: that of bench.goodput")
    parser.add_argument("--loads", nargs="+", choices=sorted(LOADS), default=sorted(LOADS))
    parser.add_argument("--servers", nargs="+", default=[DISAGGREGATED, COLOCATED, AUTO])
    parser.add_argument("--study", action="store_true", help="write the record and the page's tables")
    parser.add_argument("--cost-model", type=Path, metavar="FILE")
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
    args = parser.parse_args()
    if args.cost_model is None and not (args.validate or args.study):
        parser.error("--cost-model is needed")
    return args


def main() -> int:
    """Prints what was asked for."""
    args = _arguments()
    if args.study:
        simulate_study.run()
    elif args.validate:
        _validate(args)
    elif args.calibrate:
        _calibrate(args)
    else:
        _simulate(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
