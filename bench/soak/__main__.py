"""Faults under callers that check every answer: `python -m bench.soak [--kind storm|kill|restart]`.

    storm       everything at once, drawn from a seed: `bench.soak.storm`
    kill        one process is killed under load, as in Dynamo's fault tolerance tests: `bench.soak.kills`
    restart     the same worker is killed again and again: `bench.soak.restarts`

Exit code 1 if anything was violated. `--record` writes `bench/results/{soak,faults,restarts}.json`, from which
`python -m bench.report` renders docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from dataclasses import asdict

from bench.soak import kills, restarts
from bench.soak.storm import FLEETS, soak, summary
from bench.support.machine import RESULTS, write_record
from engine.loading import resolve_device
from kvtransfer.transports import usable


def soak_storms(options: argparse.Namespace) -> list[str]:
    """The kind `storm`. Returns the violations."""
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    fleets = " ".join(options.fleets)
    print(f"python -m bench.soak --minutes {options.minutes:g} --seed {seed} --fleets {fleets}", flush=True)
    accounts = soak(seed, options.minutes, options.only_round, options.fleets)
    results = summary(seed, options.minutes, accounts)
    print(json.dumps({name: value for name, value in results.items() if name != "violations"}, indent=2))
    if options.record:
        write_record("soak", results)
    violations: list[str] = results["violations"]
    return violations


def soak_kills(options: argparse.Namespace) -> list[str]:
    """The kind `kill`. Returns the bars that were missed."""
    outcomes = []
    for case in kills.CASES:
        if f"{case.fleet} {case.title}".startswith(options.only):
            print(f"{case.fleet}, killed: {case.title} …", file=sys.stderr, flush=True)
            outcomes.append(kills.run_case(case))
            print(json.dumps(asdict(outcomes[-1])), flush=True)
    if options.record:
        sizes = {"clients": kills.CLIENTS, "requests_each": kills.REQUESTS_EACH}
        write_record("faults", {**sizes, "outcomes": [asdict(outcome) for outcome in outcomes]})
    return [f"{each.fleet}, killed: {each.killed}: {missed}" for each in outcomes for missed in each.missed]


def soak_restarts(options: argparse.Namespace) -> list[str]:
    """The kind `restart`. Returns the violations."""
    names = [options.only] if options.only else usable(resolve_device("auto"))
    results = {name: restarts.run(name, (options.rounds + 1) // 2) for name in names}
    if options.record:
        path = RESULTS / "restarts.json"
        known = json.loads(path.read_text())["results"] if path.exists() else {}  # of other transports
        write_record("restarts", known | {name: [asdict(half) for half in halves] for name, halves in results.items()})
    for name, halves in results.items():
        for half in halves:
            print(f"{name}, {half.victim} killed {half.rounds} times: {half.calls} calls, failed: {half.failed}")
    return [
        f"{name}, {half.victim}: {what}"
        for name, halves in results.items()
        for half in halves
        for what in half.violations
    ]


def main() -> int:
    """Runs, prints, records; exit code 1 if anything was violated."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = {"storm": soak_storms, "kill": soak_kills, "restart": soak_restarts}
    parser.add_argument("--kind", choices=kinds, default="storm", help="of faults: all at random, or one kind")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long the storms last, about")
    parser.add_argument("--seed", type=int, default=None, help="what is drawn; default: another one each time")
    parser.add_argument("--only-round", type=int, default=None, metavar="N", help="this round of the seed alone")
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, default=FLEETS, help="which take turns; default: all")
    parser.add_argument("--only", default="", help="kill: cases like '1P1D decode worker'; restart: a transport")
    parser.add_argument("--rounds", type=int, default=100, help="of restart, for each transport")
    parser.add_argument("--record", action="store_true", help="write the record of a whole run")
    options = parser.parse_args()
    if options.record and (options.only_round is not None or (options.only and options.kind == "kill")):
        parser.error("--record is for a whole run")
    violations = kinds[options.kind](options)
    print(*violations, sep="\n")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
