"""Bytes and flops of kernels and steps against counts by hand and by brute force."""

import json
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from bench.ceilings import Ceilings
from bench.roofline import Cost, attention_cost, linear_cost, rms_norm_cost, silu_mul_cost, step_cost
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
    moe, dense = config(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2), config()
    one, many = (step_cost(each, [(1, 9)] * 64, BF16) for each in (dense, moe))
    expert_bytes = 30 * 3 * 576 * 1536 * 2
    assert many.num_bytes - one.num_bytes == pytest.approx(7 * expert_bytes, rel=1e-6)  # 64 tokens name all
    assert many.flops - one.flops == 64 * expert_bytes  # each a second one: two flops for each two bytes


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


def test_a_decode_step_of_one_seq_reads_all_weights_and_its_kv():
    cost = step_cost(config(), [(1, 257)], BF16)
    weights = 134_479_872  # of the 135M checkpoint, embedding counted once, norms left out
    kv_per_token = 2 * 3 * 64 * 30
    assert cost.num_bytes == 2 * (weights + kv_per_token * (257 + 1))
    assert cost.limit_s(CEILINGS) == cost.num_bytes / 50e9
    assert cost.is_memory_bound(CEILINGS)
    assert not step_cost(config(), [(2048, 2048)] * 8, BF16).is_memory_bound(CEILINGS)


def test_a_sliding_window_bounds_what_decode_reads():
    near, far = (step_cost(config(window=128), [(1, context)], BF16) for context in (512, 4096))
    assert near == far


def test_float32_work_is_held_against_the_float32_ceiling_and_does_not_add_to_other_work():
    wide, narrow = (Cost(0, 10**12, dtype).limit_s(CEILINGS) for dtype in (torch.float32, BF16))
    assert wide == 5 * narrow
    with pytest.raises(ValueError, match="no common ceiling"):
        Cost(1, 1, BF16) + Cost(1, 1, torch.float32)
