"""Bytes and flops of kernels against counts by hand and by brute force."""

import pytest
import torch

from bench.ceilings import Ceilings
from bench.roofline import Cost, attention_cost, linear_cost, rms_norm_cost, silu_mul_cost

BF16 = torch.bfloat16
CEILINGS = Ceilings("cpu", 2, read_gb_s=50.0, copy_gb_s=40.0, bf16_tflop_s=1.0, f32_tflop_s=0.2)


def test_kernels_move_each_operand_once_and_a_multiply_add_is_two_flops():
    assert linear_cost(4, 8, 16, BF16) == Cost((8 * 16 + 4 * 8 + 4 * 16) * 2, 2 * 4 * 8 * 16, BF16)
    assert rms_norm_cost(3, 16, BF16, adds=True).num_bytes == 2 * (4 * 3 * 16 + 16)
    assert silu_mul_cost(3, 16, BF16).num_bytes == 2 * (3 * 32 + 3 * 16)


@pytest.mark.parametrize("window", [None, 1, 5, 9, 40])
@pytest.mark.parametrize("lens", [(1, 1), (1, 9), (7, 7), (4, 20), (16, 17)])
def test_attention_counts_just_the_visible_pairs(lens, window):
    query_len, seq_len = lens
    seen = [range(max(0, p - (window or seq_len) + 1), p + 1) for p in range(seq_len - query_len, seq_len)]
    cost = attention_cost([lens], (4, 2), 8, torch.float32, window)
    assert cost.flops == 4 * 8 * 4 * sum(len(keys) for keys in seen)
    keys = len({key for keys in seen for key in keys})
    assert cost.num_bytes == 4 * (2 * query_len * 4 * 8 + 2 * 2 * 8 * keys)


def test_float32_work_is_held_against_the_float32_ceiling_and_does_not_add_to_other_work():
    wide, narrow = (Cost(0, 10**12, dtype).limit_s(CEILINGS) for dtype in (torch.float32, BF16))
    assert wide == 5 * narrow
    with pytest.raises(ValueError, match="no common ceiling"):
        Cost(1, 1, BF16) + Cost(1, 1, torch.float32)
