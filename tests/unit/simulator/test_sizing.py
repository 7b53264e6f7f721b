from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from simulator.cluster import Fleet
from simulator.outcomes import Slo
from simulator.sizing import _least_static

SLO = Slo(1.0, 0.1)


@dataclass
class Requests:
    """A result in which all miss the one objective or none misses any."""

    late: bool
    slow: bool
    outcomes: list[Requests] = field(init=False)

    def __post_init__(self) -> None:
        self.outcomes = [self]

    def attains(self, _: Slo) -> bool:
        return not self.late and not self.slow

    def misses_first(self, _: Slo) -> bool:
        return self.late

    def misses_between(self, _: Slo) -> bool:
        return self.slow


@pytest.mark.parametrize(("prefills", "decodes", "most"), [(7, 1, 8), (1, 7, 8), (1, 1, 2)])
def test_a_fleet_of_as_many_workers_as_there_may_be_is_found(prefills: int, decodes: int, most: int) -> None:
    def run(fleet: Fleet) -> Any:
        return Requests(fleet.prefills < prefills, fleet.decodes < decodes)

    found = _least_static(run, SLO, most)
    assert found is not None
    assert (found.prefills, found.decodes) == (prefills, decodes)


def test_none_is_found_where_the_largest_is_too_small() -> None:
    tried: list[int] = []

    def run(fleet: Fleet) -> Any:
        tried.append(fleet.num_workers)
        return Requests(late=True, slow=False)

    assert _least_static(run, SLO, 8) is None
    assert max(tried) == 8
