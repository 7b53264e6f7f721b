"""The native kernels' tiers that this machine runs, each under its name: tests make a case once and show it to all."""

from __future__ import annotations

from kernels.cpu.library import Library, usable_tiers

TIERS = usable_tiers() or ("baseline",)
"""Without a library there are none, and their tests are skipped; one that runs all the same fails at this one."""


def libraries() -> dict[str, Library]:
    """Of every tier."""
    return {tier: Library(tier) for tier in TIERS}
