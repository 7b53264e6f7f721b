from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kv_layout import DType, KvLayout, QuantDType

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, block_size=16, head_dim=64, dtype=DType.BFLOAT16)


def test_bytes_follow_from_the_shape() -> None:
    assert LAYOUT.block_shape == (30, 2, 3, 16, 64)
    assert LAYOUT.token_bytes == 30 * 2 * 3 * 64 * 2
    assert LAYOUT.block_bytes == LAYOUT.token_bytes * 16


@pytest.mark.parametrize("dtype", list(QuantDType))
def test_a_quantized_row_takes_half_of_bfloat16_and_a_scale(dtype: QuantDType) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    assert layout.block_shape == LAYOUT.block_shape
    assert layout.token_bytes == 30 * 2 * 3 * (64 + 4)
    assert layout.fields()["dtype"] == dtype.value


@given(st.integers(0, 10_000), st.integers(1, 256))
def test_blocks_hold_the_tokens_and_no_block_is_idle(num_tokens: int, block_size: int) -> None:
    layout = replace(LAYOUT, block_size=block_size)
    blocks = layout.blocks_for(num_tokens)

    assert blocks * block_size >= num_tokens
    assert (blocks - 1) * block_size < num_tokens or blocks == 0


@pytest.mark.parametrize("name", [field.name for field in fields(KvLayout)])
def test_every_dimension_is_in_the_fingerprint_and_named(name: str) -> None:
    value = DType.FLOAT16 if name == "dtype" else getattr(LAYOUT, name) + 1
    other = replace(LAYOUT, **{name: value})

    assert other.fingerprint() != LAYOUT.fingerprint()
    assert {key for key in LAYOUT.fields() if LAYOUT.fields()[key] != other.fields()[key]} == {name}


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    assert LAYOUT.fingerprint() == "312dab7f9b53a73b9308628f0359f4dc"
