"""Bytes and flops of kernels and phases against counts by hand and by brute force."""

import json
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from bench.ceilings import Ceilings
from bench.roofline import (
    Cost,
    attention_cost,
    decode_step_cost,
    decode_step_costs,
    linear_cost,
    prefill_cost,
    prefill_costs,
    rms_norm_cost,
    rotate_and_store_cost,
    serial_limit_s,
    silu_mul_cost,
    step_costs,
)
from models.config import load_model_config

BF16 = torch.bfloat16
CEILINGS = Ceilings("cpu", 2, read_gb_s=50.0, copy_gb_s=40.0, bf16_tflop_s=1.0, f32_tflop_s=0.2)


SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
"""Of the 135M model."""


@cache
def config(window=None, **more):
    items = SHAPE | {"model_type": "mistral", "sliding_window": window} | more
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(items))
        return load_model_config(Path(folder))


def test_of_experts_those_are_read_that_tokens_name_and_each_is_multiplied_by_its_own():
    moe = config(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    dense = config()
    one, many = (step_costs(each, [(1, 9)] * 64, BF16)["linear"] for each in (dense, moe))
    expert_bytes = 30 * 3 * 576 * 1536 * 2
    assert many.num_bytes - one.num_bytes == pytest.approx(7 * expert_bytes, rel=1e-6)  # 64 tokens name all
    assert many.flops - one.flops == 64 * expert_bytes  # each a second one: two flops for each two bytes
    alone = step_costs(moe, [(1, 9)], BF16)["linear"]
    assert alone.num_bytes - step_costs(dense, [(1, 9)], BF16)["linear"].num_bytes == expert_bytes


def test_linear_counts_weights_once_and_two_flops_per_multiply_add():
    assert linear_cost(4, 8, 16, BF16) == Cost((8 * 16 + 4 * 8 + 4 * 16) * 2, 2 * 4 * 8 * 16, BF16)


@pytest.mark.parametrize("window", [None, 1, 5, 9, 40])
@pytest.mark.parametrize("lens", [(1, 1), (1, 9), (7, 7), (4, 20), (16, 17)])
def test_attention_counts_just_the_visible_pairs(lens, window):
    query_len, seq_len = lens
    seen = [range(max(0, p - (window or seq_len) + 1), p + 1) for p in range(seq_len - query_len, seq_len)]
    cost = attention_cost([lens], (4, 2), 8, torch.float32, window)
    assert cost.flops == 4 * 8 * 4 * sum(len(keys) for keys in seen)
    keys = len({key for keys in seen for key in keys})
    assert cost.num_bytes == 4 * (2 * query_len * 4 * 8 + 2 * 2 * 8 * keys)


def test_small_operations_move_each_operand_once():
    assert rms_norm_cost(3, 16, BF16, adds=False).num_bytes == 2 * (3 * 16 + 16 + 3 * 16)
    assert rms_norm_cost(3, 16, BF16, adds=True).num_bytes == 2 * (4 * 3 * 16 + 16)
    assert silu_mul_cost(3, 16, BF16).num_bytes == 2 * (3 * 32 + 3 * 16)
    moved = rotate_and_store_cost(3, (4, 2), 8, BF16).num_bytes
    read, written, angles, slots = 3 * 8 * 8 * 2, 3 * (6 + 4) * 8 * 2, 2 * 3 * 4 * 4, 3 * 8
    assert moved == read + written + angles + slots


def test_a_decode_step_of_one_seq_reads_all_weights_and_its_kv():
    cost = decode_step_cost(config(), 1, 257, BF16)
    assert decode_step_costs(config(), 1, 257, BF16)["lm_head"].num_bytes == 49152 * 576 * 2
    weights = 134_479_872  # of the 135M checkpoint, embedding counted once, norms left out
    kv_per_token = 2 * 3 * 64 * 30
    assert cost.num_bytes == 2 * (weights + kv_per_token * (257 + 1))
    assert cost.limit_s(CEILINGS) == cost.num_bytes / 50e9


def test_the_last_layer_is_counted_for_the_sampled_token_only():
    layer, kv, rest = 576 * (2 * 576 + 2 * 192) + 3 * 576 * 1536, 2 * 576 * 192, 2 * 576 * 576 + 3 * 576 * 1536
    costs = prefill_costs(config(), 2, 10, BF16)
    assert costs["linear"].flops == 2 * (20 * (29 * layer + kv) + 2 * rest)
    assert costs["attention"].flops == 4 * 64 * 9 * 2 * (29 * 55 + 10)
    assert costs["lm_head"].flops == 2 * 2 * 49152 * 576


def test_a_batch_shares_the_weights_and_not_the_kv():
    one, many = (decode_step_costs(config(), batch, 256, BF16) for batch in (1, 16))
    assert many["linear"].num_bytes == one["linear"].num_bytes
    assert many["attention"].num_bytes == 16 * one["attention"].num_bytes
    assert many["linear"].intensity == 16 * one["linear"].intensity


def test_prefill_is_bound_by_compute_and_decode_by_memory():
    assert not prefill_cost(config(), 8, 2048, BF16).is_memory_bound(CEILINGS)
    assert decode_step_cost(config(), 1, 2048, BF16).is_memory_bound(CEILINGS)


def test_a_sliding_window_bounds_what_decode_reads():
    near, far = (decode_step_costs(config(window=128), 1, context, BF16)["attention"] for context in (512, 4096))
    assert near == far


def test_the_serial_limit_is_never_below_the_overlapped_one():
    parts = prefill_costs(config(), 2, 256, BF16)
    assert serial_limit_s(parts, CEILINGS) >= prefill_cost(config(), 2, 256, BF16).limit_s(CEILINGS)


def test_float32_work_is_held_against_the_float32_ceiling():
    wide, narrow = (Cost(0, 10**12, dtype).limit_s(CEILINGS) for dtype in (torch.float32, BF16))
    assert wide == 5 * narrow


def test_costs_of_different_dtypes_do_not_add_up():
    with pytest.raises(ValueError, match="no common ceiling"):
        Cost(1, 1, BF16) + Cost(1, 1, torch.float32)
