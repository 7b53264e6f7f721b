"""The record of `bench.prefix_cache` in words and tables, for the terminal and for `docs/performance.md`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.peers.page import bars_table
from bench.support.markdown import table

Document = Mapping[str, Any]


def section(results: Document) -> list[str]:
    """Part of docs/performance.md."""
    shape = results["shape"]
    parts = [
        "## Prompts that begin alike (`python -m bench.prefix_cache`)\n",
        f"The {results['model']} shape with random weights, {results['threads']} threads for each server on the same "
        f"cores; {results['callers']} callers, prompts of {shape['prompt_tokens']} tokens at most, "
        f"{shape['output_tokens']} generated, {shape['requests']} requests a round, rounds: {results['rounds']}.\n",
        bars_table(results["bars"]),
    ]
    for load, by_reuse in results["loads"].items():
        rows = [(reuse, name, *_cells(each)) for reuse, servers in by_reuse.items() for name, each in servers.items()]
        header = ("reuse", "server, cache", "hit rate", "first token p50, ms", "p99", "tokens/s", "handed over, KiB")
        parts += [f"### {load.capitalize()}\n", table(header, rows)]
    return parts


def _cells(each: Document) -> tuple[str, ...]:
    return (
        f"{each['hit_rate']:.0%}",
        *(f"{each[name]:.1f}" for name in ("first_token_p50_ms", "first_token_p99_ms", "tokens_per_s")),
        f"{each['transfer_bytes'] / 1024:.0f}",
    )
