"""The digest of blocks: known answers, what it must find, and the Triton kernel against plain torch."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from kernels.digest import as_unsigned, digest_blocks, reference_digests
from tandem.errors import InternalError

MASK = (1 << 64) - 1


def by_hand(data: bytes) -> int:
    """As the module's docstring says it, in Python's own integers."""
    total = 0
    for place, start in enumerate(range(0, len(data), 8), 1):
        z = (int.from_bytes(data[start : start + 8], "little") + place * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        total += z ^ (z >> 31)
    return total & MASK


def one_block(data: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)[None]


def digest_of(data: bytes | bytearray) -> int:
    return as_unsigned(digest_blocks(one_block(data), torch.tensor([0])))[0]


def random_blocks(num_blocks: int, block_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (num_blocks, block_bytes), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(
    ("data", "digest"),
    [
        (bytes(8), 0xE220A8397B1DCDAF),  # the first number of SplitMix64 with seed 0, as published
        (bytes(16), (0xE220A8397B1DCDAF + 0x6E789E6AA1B965F4) & MASK),  # the second one too
        (bytes(range(32)), 0xA17546E02FEB62EC),
        (b"\xff" * 13, 0x1E8A3B6729AE181D),
    ],
    ids=["zeros", "more zeros", "counting", "with a tail"],
)
def test_known_answers(data: bytes, digest: int) -> None:
    assert digest_of(data) == digest


@pytest.mark.parametrize("block_bytes", [1, 4, 7, 8, 12, 20, 64, 1000, 4099])
def test_it_is_what_its_description_says_for_any_size_and_order_of_blocks(block_bytes: int) -> None:
    blocks = random_blocks(5, block_bytes)
    chosen = [3, 0, 3, 4]
    expected = tuple(by_hand(bytes(blocks[i].tolist())) for i in chosen)
    assert as_unsigned(digest_blocks(blocks, torch.tensor(chosen))) == expected


def test_the_plain_version_works_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(7, 48)
    whole = reference_digests(blocks, torch.arange(7))
    monkeypatch.setattr("kernels.digest._WORDS_AT_A_TIME", 13)
    assert torch.equal(reference_digests(blocks, torch.arange(7)), whole)
    assert reference_digests(blocks, torch.empty(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("seed", range(3))
def test_every_changed_bit_and_every_pair_of_swapped_words_is_found(seed: int) -> None:
    chosen = random.Random(seed)
    data = chosen.randbytes(96)
    before = digest_of(data)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        assert digest_of(changed) != before
    for first in range(0, 96, 8):
        for second in range(first + 8, 96, 8):
            swapped = bytearray(data)
            swapped[first : first + 8], swapped[second : second + 8] = (
                data[second : second + 8],
                data[first : first + 8],
            )
            assert digest_of(swapped) != before


def test_a_shift_of_the_whole_block_by_a_word_is_found() -> None:
    data = random.Random(1).randbytes(64)
    assert digest_of(data) != digest_of(data[8:] + data[:8])


def test_wrong_arguments_are_refused_by_name() -> None:
    blocks, ids = torch.zeros(3, 16, dtype=torch.uint8), torch.tensor([0])
    refusals: dict[str, Callable[[], torch.Tensor]] = {
        "blocks: dtype": lambda: digest_blocks(blocks.int(), ids),
        "block_ids: dtype is torch.int32": lambda: digest_blocks(blocks, ids.int()),
        "blocks: last dimension has stride 3": lambda: digest_blocks(torch.zeros(16, 3, dtype=torch.uint8).T, ids),
    }
    for message, call in refusals.items():
        with pytest.raises(InternalError, match=f"^{message}"):
            call()
