"""Philox4x32-10: uniform numbers that are a pure function of (seed, position).

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), with
the constants of the Random123 library. There is no state: any worker that knows the seed and
the position of a token draws the same number for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS: Words = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)  # [2, 1] for words 0 and 2
_WEYL: Words = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)  # [2, 1] for key words 0 and 1
_KEY_STEPS: Words = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL  # [10, 2, 1]


def philox4x32(counter: Words, key: Words) -> Words:
    """Returns `[4, R]` words for `counter` `[4, R]` and `key` `[2, R]`; 32 bits in each uint64."""
    even, odd = counter[0::2], counter[1::2]  # [2, R] words 0 and 2; words 1 and 3
    for round_key in (key + _KEY_STEPS) & _LOW:  # [2, R]
        product = even * _MULTIPLIERS
        even = (product >> _SHIFT)[::-1] ^ odd ^ round_key
        odd = (product & _LOW)[::-1]
    return np.stack((even[0], odd[0], even[1], odd[1]))  # [4, R]


def uniforms(seeds: Sequence[int], output_indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """Returns `[R]` numbers in [0, 1), multiples of 2^-53, one per row.

    The seed's 64 bits are the key; the counter is (output index's low and high word, 0, 0). 53 bits
    are taken from the first two words of the result.
    """
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], dtype=np.uint64)
    output = np.array(output_indices, dtype=np.uint64)
    zero = np.zeros_like(output)
    counter = np.stack((output & _LOW, output >> _SHIFT, zero, zero))  # [4, R]
    first, second, _, _ = philox4x32(counter, np.stack((seed & _LOW, seed >> _SHIFT)))
    bits = ((first << _SHIFT) | second) >> np.uint64(11)
    numbers: npt.NDArray[np.float64] = bits * 2.0**-53
    return numbers
