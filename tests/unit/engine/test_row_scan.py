"""The two-level scans against torch's own one-level ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.row_scan import CHUNK, chunk_masses, first_max, inverse_cdf, largest

widths = st.sampled_from([1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 2000])


@given(widths, st.integers(0, 2**32), st.integers(1, 4))
def test_the_first_maximum_is_found_among_ties(width: int, seed: int, num_values: int) -> None:
    rows = torch.randint(0, num_values, (3, width), generator=torch.Generator().manual_seed(seed)).float()
    values, indices = first_max(rows)
    assert torch.equal(values, rows.amax(-1))
    assert indices.tolist() == [row.tolist().index(max(row.tolist())) for row in rows]


@given(widths, st.integers(0, 2**32), st.integers(1, 40))
def test_the_largest_values_are_those_of_a_full_sort(width: int, seed: int, k: int) -> None:
    k = min(k, width)
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    values, indices = largest(rows, k)
    assert torch.equal(values, rows.sort(-1, descending=True).values[:, :k])
    assert torch.equal(rows.gather(1, indices), values)
    assert all(len(set(row)) == k for row in indices.tolist())


def draw(weights: list[float], uniform: float) -> int:
    rows = torch.tensor([weights])
    return int(inverse_cdf(rows, chunk_masses(rows), torch.tensor([uniform], dtype=torch.float64)))


LAST = math.nextafter(1.0, 0.0)


@pytest.mark.parametrize("offset", [0, CHUNK - 1, CHUNK, 3 * CHUNK - 2])
@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 0), (0.2499, 0), (0.25, 2), (0.7499, 2), (0.75, 3), (LAST, 3)])
def test_a_draw_is_the_first_index_whose_cumulative_weight_exceeds_it(offset, uniform, expected) -> None:
    weights = [0.0] * offset + [1.0, 0.0, 2.0, 1.0] + [0.0] * 40
    assert draw(weights, uniform) == offset + expected


@given(st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 1.0]), min_size=1, max_size=300), st.floats(0, LAST))
def test_a_weight_of_zero_is_never_drawn_whatever_is_rounded(weights: list[float], uniform: float) -> None:
    weights = [*weights, 1.0, *weights]
    assert weights[draw(weights, uniform)] > 0.0


@given(st.integers(0, 2**32), st.floats(0, LAST))
def test_a_draw_agrees_with_one_cumulative_sum(seed: int, uniform: float) -> None:
    weights = torch.rand(1000, generator=torch.Generator().manual_seed(seed))
    drawn = draw(weights.tolist(), uniform)
    ends = weights.double().cumsum(-1)
    target, slack = uniform * float(ends[-1]), 1e-4  # chunks are summed in float32
    assert float(ends[drawn]) > target - slack
    assert drawn == 0 or float(ends[drawn - 1]) <= target + slack
