"""The native kernels' tiers that this machine runs, each under its name: tests make a case once and show it to all.

Those that are not compiled yet are, when this is imported; the processes of a test run wait for the one that does.
"""

from __future__ import annotations

from contextlib import suppress

from kernels.cpu import build
from kernels.cpu.library import Library, tier_obstacle
from kernels.cpu.tiers import machine_tiers

with suppress(build.BuildError):  # all files at once; an older compiler does not know the highest
    build.build(machine_tiers())

TIERS = tuple(tier for tier in machine_tiers() if tier_obstacle(tier) is None) or ("baseline",)
"""Without a library there are none, and their tests are skipped; one that runs all the same fails at this one."""


def libraries() -> dict[str, Library]:
    """Of every tier."""
    return {tier: Library(tier) for tier in TIERS}
