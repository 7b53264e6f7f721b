"""Renders `docs/performance.md` from `bench/results/*.json`: `python -m bench.page`. No figure is typed by hand.

One section per result file; a file that is not there has no section. Pure but for `main`.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import gpu_page
from bench.goodput_page import section as goodput_section
from bench.kernels.page import section as kernels_section
from bench.peers.page import section as peers_section
from bench.prefix_page import section as prefix_section
from bench.scale_page import control_loop_section, long_prompt_section, router_scale_section
from bench.support.markdown import table
from bench.transfer_page import transfer_section

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "performance.md"

Record = dict[str, Any]
"""`{"date", "machine", "results"}`, as every benchmark writes it."""


def render(records: dict[str, Record]) -> str:
    """The page; `records` by the stem of their file."""
    parts = [
        "# Performance\n",
        "Rendered by `python -m bench.page` from `bench/results/`; nothing here is typed by hand.",
        "Absolute times drift from run to run and from machine to machine; ratios within one section hold.",
        "What was tried and did not help is in [bench/LOG.md](../bench/LOG.md).\n",
    ]
    for pattern, section in SECTIONS.items():
        stems = fnmatch.filter(records, pattern)
        if not stems:
            parts += ABSENT.get(pattern, [])
        for stem in stems:
            record = records[stem]
            machine = ", ".join(f"{key} {value}" for key, value in record["machine"].items())
            parts += [*section(record["results"]), f"Taken {record['date']} on {machine}.\n"]
    return "\n".join(parts)


def _serving(results: dict[str, Any]) -> list[str]:
    batching, overhead = results["batching"], results["overhead"]
    shape = overhead["shape"]
    return [
        "## Continuous batching (`python -m bench.batching`)\n",
        f"{batching['requests']} requests, exponential output lengths (mean {batching['mean_output_tokens']:.0f}), "
        f"batches of {batching['batch_size']}, demo model.\n",
        table(
            ("", "tokens/s"),
            [
                ("continuous", f"{batching['continuous_tokens_per_s']:.0f}"),
                ("static batches of the same size", f"{batching['static_tokens_per_s']:.0f}"),
                ("ratio", f"{batching['continuous_over_static']:.2f}"),
            ],
        ),
        f"Unused slots in live blocks at block size 16: mean {batching['unused_slots_mean']:.1%}, "
        f"at most {batching['unused_slots_max']:.1%} in {batching['samples']} samples of the pool's own accounting.\n",
        "## What router and hand-off add (`python -m bench.overhead`)\n",
        f"{shape['streams']} streams of {shape['prompt_tokens']} + {shape['output_tokens']} tokens, demo model, "
        f"{overhead['threads']} compute thread.\n",
        table(
            ("median, ms", "engine alone", "served", "added"),
            [
                _added("per token", overhead["engine_step_ms"], overhead["served_inter_token_ms"]),
                _added("to the first token", overhead["engine_first_token_ms"], overhead["served_first_token_ms"]),
            ],
        ),
        f"The hand-off moved {overhead['transfer_bytes'] / 1024:.0f} KiB in {overhead['transfer_ms']:.2f} ms.\n",
        "## From a release to all blocks free (`python -m bench.release`)\n",
        table(
            ("stage", "median, ms", "slowest, ms"),
            [(each["stage"], f"{each['median_ms']:.2f}", f"{each['max_ms']:.2f}") for each in results["release"]],
        ),
    ]


def _added(name: str, engine_ms: float, served_ms: float) -> tuple[str, ...]:
    return (name, f"{engine_ms:.2f}", f"{served_ms:.2f}", f"{served_ms - engine_ms:.2f}")


def _growth(results: dict[str, Any]) -> list[str]:
    return [
        "## How cost grows (`python -m bench.growth`)\n",
        f"Single steps of a 135M model (bfloat16, random weights), kernels `{results['kernels']}`, "
        f"{results['threads']} threads; block size 16 where none is given.\n",
        "![step time against batch, context and block size; prompt rate against length](images/growth.svg)\n",
    ]


def _profile(results: dict[str, Any]) -> list[str]:
    profiles = results["profiles"]
    names = list(dict.fromkeys(name for each in profiles for name in each["phases"]))
    rows = [("whole step", *(f"{each['total_ms']:.2f}" for each in profiles))]
    rows += [(name, *(_phase(each["phases"].get(name)) for each in profiles)) for name in names]
    rows += [("rest", *(f"{each['rest_ms']:.2f}" for each in profiles))]
    return [
        f"## Where a step's time goes, tier {results['tier']} (`python -m bench.step_profile`)\n",
        f"The 135M shape, bfloat16, {results['threads']} threads; milliseconds of each kind of "
        "phase over all layers: at work on the thread that calls, + waiting for the others to finish. GB/s are of "
        f"weights and KV; this machine read {results['read_gb_s']:.1f} in the same run. The rest is sampling, batch "
        "building and Python.\n",
        table(("", *(each["step"] for each in profiles)), rows),
    ]


def _model_impl(results: dict[str, Any]) -> list[str]:
    return [
        f"## transformers' forward pass with our parts, {results['shape']}, tier {results['tier']} "
        f"(`python -m bench.model_impl --shape {results['shape']}`)\n",
        "Decode steps of one checkpoint, bfloat16, in one process in turns: with `--model-impl native` and "
        "`transformers`; medians of "
        f"{results['rounds']} rounds.\n",
        table(
            ("step", "native, ms", "by transformers, ms", "share of native speed (bar 0.7)"),
            [
                (each["step"], f"{each['native_ms']:.2f}", f"{each['transformers_ms']:.2f}", f"{each['share']:.2f}")
                for each in results["steps"]
            ],
        ),
    ]


def _phase(spent: dict[str, Any] | None) -> str:
    if spent is None:
        return "–"
    gb_s = spent["num_bytes"] / (spent["work_ms"] + spent["wait_ms"]) / 1e6
    rate = f", {gb_s:.0f} GB/s" if gb_s >= 1 else ""
    return f"{spent['work_ms']:.2f} + {spent['wait_ms']:.2f}{rate}"


def _scaling(results: dict[str, Any]) -> list[str]:
    header = ("phase", "requests", "failed", "wrong", "TTFT p50, ms", "TTFT max", "longest gap p50, ms", "max")
    rows = [
        (
            *(each["phase"], str(each["requests"]), str(each["failed"]), str(each["wrong"])),
            *(f"{each[name]:.0f}" for name in ("ttft_p50_ms", "ttft_max_ms", "gap_p50_ms", "gap_max_ms")),
        )
        for each in results["accounts"]
    ]
    exits = results["exits"]
    clean = sum(each["code"] == 0 for each in exits)
    return [
        "## A cluster that changes under load (`python -m bench.scaling`)\n",
        f"{results['callers']} callers, {results['max_tokens']} tokens an answer, each token checked. Two routers; "
        "workers grow from 1+1 to 2+2 and back, then every process is replaced. "
        f"{clean} of {len(exits)} processes left with exit code 0, at most "
        f"{max(each['seconds'] for each in exits):.1f} s after SIGTERM.\n",
        table(header, rows),
    ]


def _tracing(results: dict[str, Any]) -> list[str]:
    parts = [
        "## What tracing costs (`python -m bench.tracing`)\n",
        f"Closed loop, {results['prompt_tokens']} + {results['output_tokens']} tokens, demo model, every request "
        f"traced; median of {results['rounds']} rounds, in brackets the median of the rounds' ratios to the first row. "
        "The second row is the first once more: what it differs by is noise. The collector runs on the same cores and "
        f"took {results['spans']} spans.\n",
    ]
    for load in results["loads"]:
        header = (f"traces, {load['callers']} at a time", "tokens/s", *_LATENCIES.values())
        parts.append(table(header, [_traced(each) for each in load["rows"]]))
    return parts


_LATENCIES = {
    "first_token_p50_ms": "first token p50, ms",
    "inter_token_p50_ms": "inter-token p50, ms",
    "inter_token_p99_ms": "inter-token p99, ms",
}


def _traced(row: dict[str, Any]) -> tuple[str, ...]:
    pairs = [(row["median"][name], row["ratio"][name]) for name in ("tokens_per_s", *_LATENCIES)]
    return (row["tracing"], *(f"{median:.1f} ({ratio:.2f})" for median, ratio in pairs))


def _sharing(results: dict[str, Any]) -> list[str]:
    memory = [
        (
            *(row["kind"], str(row["n"]), str(row["group_blocks"]), str(row["single_blocks"]), f"{row['saved']:.0%}"),
            *(f"{row[name] / 1024:.0f}" for name in ("group_bytes", "single_bytes")),
        )
        for row in results["memory"]
    ]
    throughput = [
        (
            *(row["kind"], str(row["n"]), str(row["sequences"]), f"{row['group_s']:.2f}", f"{row['single_s']:.2f}"),
            f"{row['gain']:.2f}",
        )
        for row in results["throughput"]
    ]
    return [
        "## n choices of one request against n requests (`python -m bench.sharing`)\n",
        f"Demo model, {results['prompt_tokens']} + {results['output_tokens']} tokens, block size "
        f"{results['block_size']}, no prefix cache; most live blocks of the decode pool by its own accounting.\n",
        table(
            ("", "n", "blocks, one group", "blocks, single requests", "saved", "KiB handed over", "single requests"),
            memory,
        ),
        f"As many sequences at once, in a pool that holds {results['pool_sequences']} single requests.\n",
        table(("", "n", "sequences", "groups, s", "single requests, s", "throughput gained"), throughput),
    ]


def _small_pool(results: dict[str, Any]) -> list[str]:
    rows = [
        ("block size", str(results["block_size"])),
        ("blocks wanted, nothing shared", f"{results['demand_blocks']:.0f}"),
        ("blocks of the pool", str(results["pool_blocks"])),
        *((f"requests served, {sort}", str(count)) for sort, count in results["served"].items()),
        ("sequences of them", str(results["sequences"])),
        (
            f"unused slots of blocks in use, mean (bar {results['waste_bar']:.0%}) and most",
            f"{results['waste_mean']:.1%}, {results['waste_max']:.1%}",
        ),
        *((f"`{name}`", str(count)) for name, count in results["counters"].items()),
        ("violations", str(len(results["violations"]))),
    ]
    return [
        "## A pool too small for its callers (`python -m bench.small_pool`)\n",
        f"Demo model, {results['callers']} callers for {results['seconds']:.0f} s: several choices, beams, grammars, "
        "prompts that begin alike, priorities. Every answer is compared with that of a quiet run.\n",
        table(("", ""), rows),
    ]


def _unused(results: dict[str, Any]) -> list[str]:
    rows = [
        (
            *(str(each["streams"]), f"{each['off_ms']:.2f}", f"{each['on_ms']:.2f}", f"{each['ratio']:.3f}"),
            "–" if each["lowest"] is None else f"{each['lowest']:.3f} to {each['highest']:.3f}",
        )
        for each in results["costs"]
    ]
    return [
        "## What a decode step pays for sharing that nobody uses (`python -m bench.unused`)\n",
        f"The {results['model']} shape, prefix cache and host tier against neither, new prompts only; "
        f"{results['output_tokens']} tokens a stream, rounds: {results['rounds']}.\n",
        table(("streams", "without, ms", "with, ms", f"ratio (bar {results['bar']:g})", "95% confidence"), rows),
    ]


def _router_tokens(results: dict[str, Any]) -> list[str]:
    load, rows = results["load"], results["rows"]
    floor = next(each["us_per_token"] for each in rows if not each["workers"])
    shown = [
        (
            *(each["server"], str(each["workers"] or "–"), f"{each['us_per_token']:.1f}"),
            *(f"{each['us_per_token'] / floor:.2f}", f"{each['tokens_per_core_s'] / 1e3:.1f}"),
            f"{each['messages_per_token']:.2f}",
        )
        for each in rows
    ]
    header = (
        "server",
        "workers",
        "µs of CPU per token",
        "by the floor's",
        "thousand tokens/s per core",
        "messages/token",
    )
    return [
        "## What one router process passes on (`python -m bench.router_tokens`)\n",
        f"{load['streams']} streams over {load['connections']} connections, one token of each every "
        f"{load['interval_s'] * 1e3:.0f} ms, demo model, workers without an engine. The floor is a bare grpc.aio "
        "server that writes the same messages and does nothing else: no router on grpc.aio that sends each token as a "
        "message of its own can cost less. Of a router of several processes it is the time of all; workers and clients "
        "share its cores, so that two cores show what a token costs there, not how many pass. With many workers their "
        "heartbeats are in it too.\n",
        table(header, shown),
    ]


SECTIONS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "cpu": _serving,
    "transfer": transfer_section,
    "sharing": _sharing,
    "prefix-cache": prefix_section,
    "small-pool": _small_pool,
    "unused": _unused,
    "scaling": _scaling,
    "tracing": _tracing,
    "router-tokens": _router_tokens,
    "router-scale": router_scale_section,
    "control-loop": control_loop_section,
    "long-prompt": long_prompt_section,
    "growth": _growth,
    "profile-*": _profile,
    "model-impl-*": _model_impl,
    "peers-135m-*": peers_section,
    "peers-0.6b-*": peers_section,
    "peers-moe-*": peers_section,
    "goodput-*": goodput_section,
    "kernels-cpu": kernels_section,
    "gpu": gpu_page.section,
    "kernels-cuda": kernels_section,
}
"""By the stem of the result file, or a pattern of stems, in the order of the page."""
ABSENT: dict[str, list[str]] = {"gpu": gpu_page.ABSENT}
"""What stands where there is no such file, if anything."""


def read_records() -> dict[str, Record]:
    """All results that are there."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def main() -> int:
    """Writes the page."""
    PAGE.write_text(render(read_records()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
