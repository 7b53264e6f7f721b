import pytest

from bench.goodput_search import RateSearch, on_grid


def search_until_done(capacity_per_s: float, search: RateSearch) -> list[float]:
    """The rates that were tried on a server that passes up to its capacity."""
    tried = []
    while (rate_per_s := search.next_per_s) is not None:
        tried.append(rate_per_s)
        search.tell(passed=rate_per_s <= capacity_per_s)
    return tried


@pytest.mark.parametrize("capacity_per_s", [0.07, 0.4, 0.99, 1.0, 1.01, 3.3, 12.0])
def test_the_search_brackets_the_capacity_by_neighbours_on_the_grid(capacity_per_s: float) -> None:
    search = RateSearch(1.0, ratio=1.1, first_stride=4, max_trials=20)
    tried = search_until_done(capacity_per_s, search)
    assert search.passed_per_s is not None
    assert search.failed_per_s is not None
    assert search.passed_per_s <= capacity_per_s < search.failed_per_s
    assert search.failed_per_s == pytest.approx(1.1 * search.passed_per_s)
    assert len(set(tried)) == len(tried) <= 12


def test_the_search_ends_after_its_trials_and_tells_what_is_known() -> None:
    search = RateSearch(1.0, ratio=2.0, first_stride=1, max_trials=2)
    assert search_until_done(0.01, search) == [1.0, 0.5]
    assert (search.passed_per_s, search.failed_per_s) == (None, 0.5)
    search = RateSearch(1.0, ratio=2.0, first_stride=1, max_trials=3)
    assert search_until_done(100.0, search) == [1.0, 2.0, 8.0]
    assert (search.passed_per_s, search.failed_per_s) == (8.0, None)


def test_the_search_ends_where_a_trial_would_be_too_slow() -> None:
    search = RateSearch(1.0, ratio=2.0, first_stride=1, max_trials=9, least_per_s=0.3)
    assert search_until_done(0.01, search) == [1.0, 0.5]
    assert (search.passed_per_s, search.failed_per_s) == (None, 0.5)


def test_the_search_tries_the_lowest_rate_that_is_not_too_slow() -> None:
    search = RateSearch(0.25, ratio=1.2, first_stride=2, max_trials=5, least_per_s=40 / 300)
    assert search_until_done(0.01, search) == pytest.approx([0.25, 0.25 / 1.2**2, 0.25 / 1.2**3])


def test_a_search_whose_first_rate_would_be_too_slow_begins_at_the_least_one() -> None:
    search = RateSearch(0.1, ratio=2.0, first_stride=1, max_trials=9, least_per_s=0.3)
    assert search_until_done(0.01, search) == [0.3]
    assert (search.passed_per_s, search.failed_per_s) == (None, 0.3)


def test_searches_that_begin_at_like_rates_try_the_same_ones() -> None:
    assert on_grid(1.158, 1.2) == on_grid(1.25, 1.2) == pytest.approx(1.2)
    assert on_grid(0.95, 1.2) == 1.0
