"""The page's section on hand-offs: `bench.transfer`."""

from __future__ import annotations

from typing import Any

from bench.support.markdown import table


def transfer_section(results: dict[str, Any]) -> list[str]:
    """Of `bench/results/transfer.json`."""
    header = (
        "",
        "block, KiB",
        "median, GB/s",
        "best, GB/s",
        "of its ceiling",
        "one block, ms",
        "none, ms",
        "first, ms",
    )
    rows = [
        (
            *(each["transport"], f"{each['block_bytes'] / 1024:.0f}"),
            *(f"{each[name]:.2f}" for name in ("median_gb_per_s", "best_gb_per_s")),
            *(_figure(each[name]) for name in ("of_ceiling", "one_block_ms", "empty_ms", "connect_ms")),
        )
        for each in (*results["ceilings"], *results["results"])
    ]
    megabytes = results["ceilings"][0]["num_bytes"] / 1e6
    return [
        "## Moving blocks between two processes (`python -m bench.transfer`)\n",
        f"Hand-offs of {megabytes:.0f} MB from `open` to COMMITTED, each block hashed on both sides; the ceilings are "
        f"taken in turn with them, {results['rounds']} rounds. The ceiling of shm is the plain copy, of tcp the raw "
        "socket, of nixl its own write, all without hashes; what remains of each with hashes on both sides, and "
        "nothing else that a hand-off does, is in its second row. Ratios are medians of the rounds' own. Then what a "
        "hand-off of one block, and of none, costs over an open connection, and the first one: it connects, and "
        "touches each page of the receiver's memory first.\n",
        table(header, rows),
    ]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
