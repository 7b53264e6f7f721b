"""The page's sections on scale: `bench.control_loop`, `bench.long_prompt` and `bench.router_scale`."""

from __future__ import annotations

from typing import Any

from bench.support.markdown import table

_PARTS = ("plan", "prepare", "collect", "apply", "messages", "rest")


def control_loop_section(results: dict[str, Any]) -> list[str]:
    """Of `bench/results/control-loop.json`."""
    before, after = results.get("before", {}), results["after"]
    header = ("sequences", *(("before, ms",) if before else ()), "ms per step", *_PARTS)
    rows = [
        (
            f"{int(num_seqs):,}",
            *((f"{before[num_seqs]['total']:.2f}",) if before else ()),
            f"{found['total']:.2f}",
            *(f"{found[part]:.2f}" for part in _PARTS),
        )
        for num_seqs, found in after.items()
    ]
    return [
        "## What a step costs the decode worker's event loop (`python -m bench.control_loop`)\n",
        "Processor time of the loop's thread per step while all sequences decode, with the real core, pool, cache and "
        "router session, the real runner, and in the place of the model a function that answers at once"
        f"{_versions(results)}.\n",
        table(header, rows),
    ]


def long_prompt_section(results: dict[str, Any]) -> list[str]:
    """Of `bench/results/long-prompt.json`."""
    before, after = results.get("before", {}), results["after"]
    header = ("call", *(("before, ms",) if before else ()), "ms")
    rows = [
        (name, *((f"{before[name]:.2f}",) if before else ()), f"{ms:.2f}")
        for name, ms in after.items()
        if max(ms, before.get(name, 0.0)) >= 0.1
    ]
    return [
        "## What the longest prompt costs the decode worker's event loop (`python -m bench.long_prompt`)\n",
        f"One prompt of {results['num_tokens']:,} tokens at block size {results['block_size']}, its calls one after "
        'the other, "again" once the cache holds it; processor time of the loop\'s thread, best of several runs'
        f"{_versions(results)}. Calls below 0.1 ms are left out. What is done in pieces has its longest piece here.\n",
        table(header, rows),
    ]


def router_scale_section(results: dict[str, Any]) -> list[str]:
    """Of `bench/results/router-scale.json`."""
    requests = [
        (
            f"{each['num_workers']:,}",
            *(f"{each[name]:.3f}" for name in ("intake_p50_ms", "placement_p50_ms", "placement_p99_ms")),
        )
        for each in results["requests"]
    ]
    beats = [
        (
            *(f"{each['num_workers']:,}", each["state"], f"{each['per_s']:.0f}"),
            *(f"{each['cpu_s_per_s']:.2f}", f"{each['us_each']:.0f}"),
        )
        for each in results["heartbeats"]
    ]
    return [
        "## What many workers cost a router (`python -m bench.router_scale`)\n",
        "Time on the router's event loop for each request, and the processor time that heartbeats take.\n",
        table(("workers", "intake p50, ms", "placement p50, ms", "p99, ms"), requests),
        "",
        table(("workers", "state", "heartbeats/s", "CPU s per s", "µs each"), beats),
    ]


def _versions(results: dict[str, Any]) -> str:
    return f'; "before" is commit {results["before_commit"]}' if "before_commit" in results else ""
