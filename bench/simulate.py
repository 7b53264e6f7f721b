"""Tandem on a simulated clock (see `simulator`): goodput, attainment and use of any deployment under any trace.

    python -m bench.simulate --cost-model FILE --fleet 2P3D --trace poisson --rate 4 --ttft 2 --itl 0.1 [--search]
    python -m bench.simulate --calibrate MODEL --threads 2 --cost-model FILE     fits FILE to this machine

A fleet is `xPyD`, `N colocated` or `N auto`. Traces: poisson, bursty, conversation, agentic, or a file of JSON lines
as Mooncake publishes them. With `--lose-every S` one worker is lost each S seconds, and back after `--back-after`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from bench.calibrate import calibrate
from simulator.cluster import Failures, Fleet, Policy, Setup, simulate
from simulator.costs import read_costs
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
