"""Philox against the known-answer vectors of the Random123 library (kat_vectors, philox4x32 10)."""

from __future__ import annotations

import numpy as np

from engine.philox import philox4x32, uniforms

KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16)] for word in text.split()], dtype=np.uint64)


def test_rows_give_the_published_answers_whatever_stands_beside_them() -> None:
    counters, keys, expected = (np.concatenate([*map(words, part)], 1) for part in zip(*KNOWN_ANSWERS, strict=True))
    assert (philox4x32(counters, keys) == expected).all()


def test_a_uniform_takes_53_bits_of_the_first_two_words() -> None:
    assert uniforms([0], [0]).tolist() == [(0x6627E8D5E169C58D >> 11) * 2.0**-53]


def test_seed_and_position_each_change_the_number() -> None:
    seeds, positions = [7, 8, 7, 7, 7 + 2**32], [0, 0, 1, 2**32, 0]
    assert len(set(uniforms(seeds, positions).tolist())) == 5


def test_any_integer_is_a_seed_by_its_low_64_bits() -> None:
    assert uniforms([-1], [0]) == uniforms([2**64 - 1], [0]) == uniforms([2**128 - 1], [0])


def test_uniforms_lie_in_the_half_open_unit_interval_and_fill_it_evenly() -> None:
    count = 4096
    values = uniforms([3] * count, range(count))
    assert values.min() >= 0.0
    assert values.max() < 1.0
    histogram = np.histogram(values, bins=64, range=(0, 1))[0]
    expected = count / 64
    assert ((histogram - expected) ** 2 / expected).sum() < 117.3  # chi-square, 63 degrees, p = 0.00004
