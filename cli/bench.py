"""`tandem bench`: load on a running server, measured from the client's side (see `cli.load`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from cli.command import Subparsers, add_command, count, natural, not_negative, positive
from cli.load.plot import can_plot, draw
from cli.load.run import run as run_load
from cli.load.workload import LoadOptions
from shell.config import ClientConfig, add_arguments, load
from tandem.errors import ConfigError


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    parser = add_command(
        subparsers,
        "bench",
        run,
        "Open loop with --rate: requests arrive on schedule whether or not earlier ones have ended, and latency counts "
        "from the scheduled arrival. Closed loop with --concurrency: so many callers, each waiting for its answer. "
        "Prompts are random token ids; end-of-text is ignored, so that the work is known.",
    )
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--rate", type=positive, metavar="PER_S", help="requests per second [4]")
    loop.add_argument("--concurrency", type=count, metavar="N", help="callers at a time")
    parser.add_argument(
        "--arrivals", choices=("poisson", "fixed"), default="poisson", help="gaps between arrivals [poisson]"
    )
    parser.add_argument("--requests", type=count, default=100, metavar="N", help="requests that count [100]")
    parser.add_argument("--warmup", type=natural, default=2, metavar="N", help="requests before, not counted [2]")
    parser.add_argument("--prompt-tokens", type=count, default=128, metavar="N", help="mean prompt length [128]")
    parser.add_argument("--output-tokens", type=count, default=64, metavar="N", help="mean answer length [64]")
    parser.add_argument(
        "--lengths", choices=("fixed", "exponential"), default="fixed", help="how lengths are distributed [fixed]"
    )
    parser.add_argument(
        "--temperature", type=not_negative, default=1.0, metavar="T", help="of the draws; 0 = the likeliest token [1]"
    )
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="same seed, same arrivals and prompts [0]")
    parser.add_argument("--slo-ttft-ms", type=positive, metavar="MS", help="goodput: first token within this")
    parser.add_argument("--slo-itl-ms", type=positive, metavar="MS", help="goodput: p99 of a request's ITL within this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and every request as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the distributions (needs matplotlib)")
    add_arguments(parser, ClientConfig)


def run(namespace: argparse.Namespace) -> int:
    """Runs the load and prints its report; 1 if no request succeeded. Raises TandemError."""
    config = load(ClientConfig, namespace)
    options = LoadOptions(
        rate_per_s=None if namespace.concurrency else namespace.rate or 4.0,
        concurrency=namespace.concurrency,
        arrivals=namespace.arrivals,
        num_requests=namespace.requests,
        num_warmup=namespace.warmup,
        prompt_tokens=namespace.prompt_tokens,
        output_tokens=namespace.output_tokens,
        lengths=namespace.lengths,
        temperature=namespace.temperature,
        seed=namespace.seed,
        slo_ttft_s=None if namespace.slo_ttft_ms is None else namespace.slo_ttft_ms / 1e3,
        slo_itl_s=None if namespace.slo_itl_ms is None else namespace.slo_itl_ms / 1e3,
    )
    if namespace.plot is not None and not can_plot():
        raise ConfigError("--plot", "needs matplotlib, which is not installed here")
    report = run_load(config.target, options, config.timeout_s, config.security)
    print(report.as_text())
    if namespace.json is not None:
        _write(lambda: namespace.json.write_text(report.as_json() + "\n", encoding="utf-8"), "--json")
    if namespace.plot is not None:
        _write(lambda: draw(report, namespace.plot), "--plot")
    return 0 if report.num_succeeded else 1


def _write(write: Callable[[], object], option: str) -> None:
    try:
        write()
    except OSError as error:
        raise ConfigError(option, f"cannot write {error.filename}: {error.strerror}") from error
