"""The plan of a hand-off between pools that ranks divide, against blocks that are copied byte by byte."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.plan import WHOLE, Plan, places
from tandem.errors import ConfigError
from tandem.kv_layout import DType, KvLayout
from tests.parted_pool import part_of

SIZES = (1, 2, 4, 8)


def layout_of(num_heads: int) -> KvLayout:
    return KvLayout(num_layers=1, num_kv_heads=num_heads, block_size=1, head_dim=1, dtype=DType.FLOAT16)


def divides(num_heads: int, num_ranks: int) -> bool:
    return num_heads % num_ranks == 0 or num_ranks % num_heads == 0


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 16))
def test_every_byte_of_every_part_comes_from_where_it_lies(num_heads: int, num_sources: int, num_targets: int) -> None:
    layout = layout_of(num_heads)
    if not (divides(num_heads, num_sources) and divides(num_heads, num_targets)):
        with pytest.raises(ConfigError, match="K/V heads"):
            Plan.between(layout, num_sources, num_targets)
        return
    plan = Plan.between(layout, num_sources, num_targets)
    block = torch.arange(layout.block_bytes, dtype=torch.uint8)[None]
    sources = [part_of(block, num_heads, rank, num_sources)[0] for rank in range(num_sources)]
    expected = [part_of(block, num_heads, rank, num_targets)[0] for rank in range(num_targets)]
    targets = [torch.full_like(each, 255) for each in expected]

    size, written = layout.block_bytes // plan.num_grains, set()
    for source, source_place, target, target_place in plan.moves():
        taken = sources[source][source_place * size : (source_place + 1) * size]
        targets[target][target_place * size : (target_place + 1) * size] = taken
        assert (target, target_place) not in written
        written.add((target, target_place))
    assert all(map(torch.equal, targets, expected))
    assert [place.grain for place in places(plan.source)] == list(range(plan.num_grains)), "each is read from one part"


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("num_heads", [1, 2, 8])
def test_equal_sizes_need_one_span_of_a_part(num_heads: int, num_ranks: int) -> None:
    plan = Plan.between(layout_of(num_heads), num_ranks, num_ranks)
    assert len(list(plan.moves())) == num_ranks
    assert plan.num_grains == min(num_heads, num_ranks)


@pytest.mark.parametrize("num_sources", SIZES)
@pytest.mark.parametrize("num_targets", SIZES)
def test_no_pair_of_powers_of_two_cuts_finer_than_its_finer_side(num_sources: int, num_targets: int) -> None:
    plan = Plan.between(layout_of(8), num_sources, num_targets)
    assert plan.num_grains == len(list(plan.moves())) == max(num_sources, num_targets)


def test_a_block_that_nobody_divides_is_one_grain() -> None:
    plan = Plan.between(layout_of(8), 1, 1)
    assert plan.is_whole
    assert places(plan.target) == WHOLE
    assert plan.copies == ()


def test_ranks_that_share_a_head_copy_it_from_the_first_of_them() -> None:
    assert Plan.between(layout_of(2), 1, 8).copies == ((0, 1), (0, 2), (0, 3), (4, 5), (4, 6), (4, 7))
