"""How much a deployment carries, and how small one may be for a load: searches over simulations.

A deployment passes if at least `GOOD_SHARE` of the requests attain their objectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shell.telemetry import metric_names
from simulator.cluster import Fleet, Policy, Setup, simulate
from simulator.outcomes import GOOD_SHARE, Result, Slo
from simulator.traces import MakeTrace, Trace
from tandem.types import Role

_RATE_RATIO = 1.05
_FIRST_STRIDE = 0.4
"""Logarithm of the first two rates' ratio."""
_FURTHEST = 200
"""Steps of the grid from the first rate."""
_GROWTH = 0.25
"""Share by which a role that lacks workers grows."""


def passes(result: Result, slo: Slo) -> bool:
    """Whether enough requests attain their objectives."""
    wanted = math.ceil(GOOD_SHARE * len(result.outcomes))
    return sum(each.attains(slo) for each in result.outcomes) >= wanted


def highest_rate(
    setup: Setup, make: MakeTrace, slo: Slo, first_per_s: float = 1.0, ratio: float = _RATE_RATIO
) -> float:
    """Requests per second, on the grid `first_per_s * ratio**n`, at which `setup` still passes.

    0 = at none that was tried; infinity = at all, since they are too few.
    """
    found: dict[int, bool] = {}

    def ok(index: int) -> bool:
        if index not in found:
            found[index] = passes(simulate(setup, make(first_per_s * ratio**index)), slo)
        return found[index]

    stride = max(1, round(_FIRST_STRIDE / math.log(ratio)))
    low, high = (0, None) if ok(0) else (None, 0)
    while high is None and low is not None:
        if low > _FURTHEST:
            return math.inf
        low, high = (low + stride, None) if ok(low + stride) else (low, low + stride)
        stride *= 2
    while low is None and high is not None:
        if high < -_FURTHEST:
            return 0.0
        low, high = (high - stride, high) if ok(high - stride) else (None, high - stride)
        stride *= 2
    assert low is not None
    assert high is not None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ok(middle) else (low, middle)
    return first_per_s * ratio**low


def least_fleet(setup: Setup, trace: Trace, slo: Slo, policy: Policy, max_workers: int) -> tuple[Fleet, Result] | None:
    """The smallest fleet of `policy` that passes, and how it fared; None if even `max_workers` do not.

    `setup.fleet` is not looked at.
    """
    tried: dict[Fleet, Result] = {}

    def run(fleet: Fleet) -> Result:
        if fleet not in tried:
            tried[fleet] = simulate(replace(setup, fleet=fleet), trace)
        return tried[fleet]

    if policy is Policy.STATIC:
        fleet = _least_static(run, slo, max_workers)
    else:
        fleet = _least_alike(run, slo, policy, max_workers)
    return None if fleet is None else (fleet, run(fleet))


def thresholds(result: Result) -> dict[str, dict[str, float]]:
    """For autoscalers, by role and metric: what workers show on average in the least deployment that passes."""
    found: dict[str, dict[str, float]] = {}
    for role, use in result.uses.items():
        shown = found[role] = {}
        if role == Role.PREFILL:
            shown[metric_names.PREFILL_QUEUED_TOKENS.name] = use.queued_tokens
        else:
            shown[metric_names.POOL_USAGE.name] = use.pool_share
        if role == Role.ELASTIC:
            shown[metric_names.DECODE_QUEUED_TOKENS.name] = use.queued_tokens
    return found


def _least_alike(run: Callable[[Fleet], Result], slo: Slo, policy: Policy, max_workers: int) -> Fleet | None:
    """Finds the least fleet of equal workers: doubles, then halves the gap."""
    low, high = 0, 1
    while not passes(run(Fleet(policy, high)), slo):
        if high >= max_workers:
            return None
        low, high = high, min(max_workers, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(run(Fleet(policy, middle)), slo) else (middle, high)
    return Fleet(policy, high)


def _least_static(run: Callable[[Fleet], Result], slo: Slo, max_workers: int) -> Fleet | None:
    """Late first tokens ask for prefill workers, long gaps and lost requests for decode workers; then both shrink."""
    fleet = Fleet(Policy.STATIC, decodes=1, prefills=1)
    while not passes(run(fleet), slo):
        if fleet.num_workers >= max_workers:
            return None
        late = sum(each.misses_first(slo) for each in run(fleet).outcomes)
        slow = sum(each.misses_between(slo) for each in run(fleet).outcomes)
        most = max_workers - fleet.num_workers
        if late >= slow:
            fleet = replace(fleet, prefills=fleet.prefills + min(most, _more(fleet.prefills)))
        else:
            fleet = replace(fleet, decodes=fleet.decodes + min(most, _more(fleet.decodes)))
    while smaller := [each for each in _smaller(fleet) if passes(run(each), slo)]:
        fleet = smaller[0]
    return fleet


def _more(workers: int) -> int:
    return max(1, round(_GROWTH * workers))


def _smaller(fleet: Fleet) -> list[Fleet]:
    """With a worker less."""
    found = [replace(fleet, prefills=fleet.prefills - 1), replace(fleet, decodes=fleet.decodes - 1)]
    return [each for each in found if each.prefills >= 1 and each.decodes >= 1]
