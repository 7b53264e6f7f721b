"""A sequence whose mask is not made yet takes no part in a step, and keeps its seat."""

from __future__ import annotations

from typing import Any

import numpy as np

from decode_worker.scheduler import StepPlan, StepPlanner
from engine.block_pool import BlockPool
from engine.group import Group
from engine.guides import Guide
from engine.prefix_cache import PrefixCache
from tandem.types import Constraint, GroupSpec, Language, RequestId, SamplingParams, TokenId
from tests.asked import Asked
from worker.admission import Forecast
from worker.request import Rank

BLOCK_SIZE = 4
CONSTRAINT = Constraint(Language.REGEX, ("a",))


def landed(pool: BlockPool, rank: Rank, *, guided: bool) -> Asked:
    """One token to compute; with a guide, its mask is not there."""
    params = SamplingParams(max_tokens=9, constraint=CONSTRAINT if guided else None)
    group = Group(GroupSpec(RequestId("r"), (TokenId(1),) * 5, params))
    if guided:
        matcher: Any = None
        group.guide_choices([Guide(CONSTRAINT, matcher, np.ones(1, np.uint32), lambda _: None)])
    group.land(tuple(pool.allocate(2)), {0: TokenId(1)}, pool)
    return Asked(rank, group)


def planned(running: list[Asked], waiting: list[Asked], pool: BlockPool, max_seqs: int = 4) -> StepPlan:
    requests: Any = (running, waiting)
    return StepPlanner(*requests, PrefixCache(pool), Forecast(pool, 4), max_seqs=max_seqs, chunk_tokens=16).plan()


def test_only_those_with_a_mask_or_without_a_grammar_are_scheduled() -> None:
    pool = BlockPool(32, BLOCK_SIZE)
    bound, free = landed(pool, (0, 0), guided=True), landed(pool, (0, 1), guided=False)

    assert [request for request, *_ in planned([bound, free], [], pool).scheduled] == [free]

    guide = bound.group.sequences[0].guide
    assert guide is not None
    guide.mask = np.ones(1, np.uint32)
    assert [request for request, *_ in planned([bound, free], [], pool).scheduled] == [bound, free]


def test_a_late_mask_costs_nobody_a_seat() -> None:
    pool = BlockPool(32, BLOCK_SIZE)
    bound, ahead = landed(pool, (0, 1), guided=True), landed(pool, (-1, 0), guided=False)

    plan = planned([bound], [ahead], pool, max_seqs=1)

    assert not plan.scheduled
    assert not plan.preempted
