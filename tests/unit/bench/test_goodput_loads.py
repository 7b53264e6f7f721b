import math
from itertools import pairwise
from statistics import mean, median, pstdev

import pytest

from bench.goodput_trial import LOADS, Load, arrivals

MIXED = LOADS["mixed"]


def test_the_same_seed_makes_the_same_requests_and_another_one_others() -> None:
    assert arrivals(MIXED, 2.0, 50, seed=1) == arrivals(MIXED, 2.0, 50, seed=1)
    assert arrivals(MIXED, 2.0, 50, seed=1) != arrivals(MIXED, 2.0, 50, seed=2)


def test_gaps_between_arrivals_are_those_of_a_poisson_process() -> None:
    gaps_s = [later.at_s - earlier.at_s for earlier, later in pairwise(arrivals(MIXED, 5.0, 4000, seed=3))]
    assert mean(gaps_s) == pytest.approx(0.2, rel=0.02)
    assert pstdev(gaps_s) == pytest.approx(0.2, rel=0.1)
    assert sum(gap > 0.2 for gap in gaps_s) / len(gaps_s) == pytest.approx(math.exp(-1), rel=0.1)


@pytest.mark.parametrize("count", [20, 1000])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_lengths_have_their_median_and_bounds_with_few_requests_too(load: Load, count: int) -> None:
    requests = arrivals(load, 1.0, count, seed=7)
    for lengths, found in (
        (load.prompt, [each.prompt_tokens for each in requests]),
        (load.output, [each.output_tokens for each in requests]),
    ):
        assert median(found) == pytest.approx(lengths.median, rel=0.12)
        assert lengths.least <= min(found) <= max(found) <= lengths.most
