"""The native row maximum finds what torch's own does, and rows that have none."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.library import Library
from kernels.cpu.row_max import RowMax
from tandem.errors import InternalError
from tests.kernels.tiers import TIERS

pytestmark = pytest.mark.native


@pytest.fixture(params=TIERS, scope="module")
def row_max(request):
    return RowMax(Library(request.param))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_the_first_of_the_greatest(row_max, dtype):
    for rows, width in ((0, 5), (1, 1), (3, 15), (2, 1024), (17, 1025), (5, 49152)):
        logits = torch.randn(rows, width + 3).to(dtype)[:, 1:-2]
        if width > 7:
            logits[:, [5, 7, width - 1]] = 9.0  # equals
        expected = [int((row == row.max()).nonzero()[0]) for row in logits]
        assert row_max(logits).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("at", [0, 16, 1000, 1024, 3000])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_row_with_nan_or_infinity_has_none(row_max, broken, at, dtype):
    logits = torch.zeros(3, 3001, dtype=dtype)
    logits[1, at] = broken
    assert row_max(logits).tolist() == [0, -1, 0]


def test_minus_infinity_is_like_any_value_but_where_it_is_all(row_max):
    logits = torch.full((2, 2050), -torch.inf)
    logits[1, 2049] = -1e30
    assert row_max(logits).tolist() == [-1, 2049]


@pytest.mark.parametrize("rows", [torch.zeros(2, 3).double(), torch.zeros(2, 0), torch.zeros(3), torch.zeros(3, 2).T])
def test_rows_that_do_not_fit_are_refused_by_name(row_max, rows):
    with pytest.raises(InternalError, match="rows: "):
        row_max(rows)
