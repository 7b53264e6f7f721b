"""`tandem plan`: how many workers of each role a load needs, by simulation (see `simulator`)."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from cli.command import Subparsers, add_command, count, positive
from cli.thresholds import write_component
from tandem.errors import ConfigError, Unavailable


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    parser = add_command(
        subparsers,
        "plan",
        run,
        "Replays a trace on a simulated clock through Tandem's own placement and schedulers, with step times from a "
        "cost model, and looks for the least workers with which 90 % of the requests meet both objectives: of static "
        "roles and of elastic workers. Needs the worker extra, no model and no GPU; without options it takes a cost "
        "model and a trace that come with Tandem, and says which.",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="JSON lines as Mooncake's: timestamp (ms), input_length, "
        "output_length, hash_ids (blocks of 512 tokens that prompts share); [100 chats, one each second]",
    )  # fmt: skip
    parser.add_argument("--rate", type=positive, metavar="PER_S", help="requests per second; [as in the trace]")
    parser.add_argument("--ttft", type=positive, default=2.0, metavar="S", help="objective for the first token [2]")
    parser.add_argument(
        "--itl", type=positive, default=0.1, metavar="S", help="objective for the 95th percentile between tokens [0.1]"
    )
    parser.add_argument(
        "--cost-model", metavar="NAME|FILE", help="one that comes with Tandem, such as 135m-avx2 or 8b-h200, or a file "
        "as `python -m bench.simulate --calibrate` writes; [the one of a machine like this]",
    )  # fmt: skip
    parser.add_argument("--max-workers", type=count, default=64, metavar="N", help="of all roles together [64]")
    parser.add_argument(
        "--autoscaler", type=Path, metavar="DIR", help="also thresholds for autoscalers, and a kustomize component in "
        "DIR that sets them in those of deploy/components/autoscale-*",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(namespace: argparse.Namespace) -> int:
    """Prints the plan. Raises ConfigError for a bad file, Unavailable if no fleet is large enough."""
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise ConfigError("tandem plan", f"needs {error.name}; install the extra `worker`") from error
    plan = _plan(namespace)
    passing = [each for each in plan["fleets"].values() if each is not None]
    if namespace.autoscaler is not None and passing:
        write_component(
            namespace.autoscaler, {role: each for found in passing for role, each in found["thresholds"].items()}
        )
    if namespace.json:
        print(json.dumps(plan, indent=2))
    else:
        print("\n".join(_lines(plan)))
    if not passing:
        raise Unavailable(f"even {namespace.max_workers} workers do not meet the objectives")
    return 0


def _plan(namespace: argparse.Namespace) -> dict[str, Any]:
    from simulator.cluster import Fleet, Policy, Setup
    from simulator.costs import read_costs
    from simulator.outcomes import Slo
    from simulator.shipped import SAMPLE_TRACE, model_file, model_of_this_machine
    from simulator.sizing import least_fleet, thresholds
    from simulator.traces import at_rate, rate_of, read_jsonl

    model = namespace.cost_model or model_of_this_machine()
    costs = read_costs(model_file(model))
    trace = read_jsonl(namespace.trace or SAMPLE_TRACE)
    if namespace.rate is not None:
        trace = at_rate(trace, namespace.rate)
    slo = Slo(namespace.ttft, namespace.itl)
    fleets: dict[str, Any] = {}
    for policy in (Policy.STATIC, Policy.AUTO):
        setup = Setup(Fleet(policy, 1, 1 if policy is Policy.STATIC else 0), costs)
        found = least_fleet(setup, trace, slo, policy, namespace.max_workers)
        if found is None:
            fleets[policy] = None
            continue
        fleet, result = found
        fleets[policy] = {"prefill": fleet.prefills, str(fleet.roles[-1]): fleet.decodes, **result.document(slo)}
        if namespace.autoscaler is not None:
            fleets[policy]["thresholds"] = thresholds(result)
    return {
        "requests": len(trace),
        "rate_per_s": rate_of(trace),
        "trace": "the sample" if namespace.trace is None else str(namespace.trace),
        "objectives": {"ttft_s": slo.ttft_s, "itl_s": slo.itl_s},
        "cost_model": model,
        "costs": costs.source,
        "fleets": fleets,
    }


def _lines(plan: dict[str, Any]) -> list[str]:
    objectives = plan["objectives"]
    lines = [
        f"trace: {plan['trace']}, {plan['requests']} requests at {plan['rate_per_s']:.2f}/s; first tokens within "
        f"{objectives['ttft_s']:g} s, then {objectives['itl_s']:g} s",
        f"cost model: {plan['cost_model']} ({plan['costs'] or 'no source'})",
    ]
    for policy, found in plan["fleets"].items():
        if found is None:
            lines.append(f"{policy:7} too small, whatever the roles")
            continue
        workers = ", ".join(f"{use['workers']} {role} ({use['busy']:.0%} busy)" for role, use in found["use"].items())
        lines.append(f"{policy:7} {workers}: {found['attainment']:.1%} attain, {found['goodput_per_s']:.2f}/s")
        for role, values in found.get("thresholds", {}).items():
            lines += [f"        {role} {name}: {value:g}" for name, value in values.items()]
    return lines
