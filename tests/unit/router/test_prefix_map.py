"""What a router believes of one worker's cache."""

from __future__ import annotations

from array import array

import pytest

from router import prefix_map
from router.prefix_map import EXPECT_S, Prefix, PrefixMap
from shell.prefix_hash import block_hashes, salt_hash
from tandem.types import TokenId

TOKENS = tuple(map(TokenId, range(100)))
TOKEN_BYTES = array("I", TOKENS).tobytes()


def num_likely(held: PrefixMap, hashes: list[int], now_s: float) -> int:
    return held.num_likely(hashes, held.num_reported(hashes), now_s)


@pytest.fixture
def held() -> PrefixMap:
    """Of a worker that has said that it holds nothing."""
    made = PrefixMap()
    made.change([], [], cleared=True)
    return made


@pytest.mark.parametrize("block_size", [1, 7, 16, 100, 101])
async def test_blocks_are_named_as_workers_name_them(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_map, "_BLOCKS_AT_ONCE", 3)
    prefix = Prefix("salt", TOKENS)
    assert prefix.hashes(block_size) == ()
    await prefix.name_blocks(block_size)
    assert prefix.hashes(block_size) == block_hashes(salt_hash("salt"), TOKEN_BYTES, block_size)
    assert prefix.most_tokens(block_size) == 99 // block_size * block_size


@pytest.mark.parametrize("num_held", range(7))
def test_the_longest_match_is_found_wherever_it_ends(held: PrefixMap, num_held: int) -> None:
    hashes = block_hashes(salt_hash(""), TOKEN_BYTES, 16)
    held.change(hashes[:num_held], [], cleared=False)
    assert held.num_reported(hashes) == num_likely(held, hashes, 0.0) == num_held
    assert held.num_reported(block_hashes(salt_hash("other salt"), TOKEN_BYTES, 16)) == 0


def test_what_a_worker_says_replaces_what_was_known(held: PrefixMap) -> None:
    held.change([1, 2, 3], [], cleared=False)
    held.change([], [3, 4], cleared=False)
    assert held.num_reported([1, 2, 3]) == 2
    held.change([1], [], cleared=True)
    assert held.num_reported([1, 2]) == 1
    held.forget()
    assert held.num_reported([1]) == 0


def test_what_was_sent_to_a_worker_is_expected_of_it_for_a_while(held: PrefixMap) -> None:
    held.expect([1, 2, 3], 100.0)
    assert num_likely(held, [1, 2, 3, 4], 100.0) == 3
    assert held.num_reported([1, 2, 3]) == 0
    assert num_likely(held, [1, 2, 3], 100.0 + EXPECT_S) == 0
    held.expect([1, 2, 3], 101.0)
    held.change([1, 2], [], cleared=False)
    assert num_likely(held, [1, 2, 3], 101.0) == 3
    assert num_likely(held, [1, 2, 3], 101.0 + EXPECT_S) == 2
    held.change([], [3], cleared=False)
    assert num_likely(held, [1, 2, 3], 101.0) == 2


def test_nothing_is_expected_of_a_worker_that_does_not_tell() -> None:
    held = PrefixMap()
    held.expect([1], 0.0)
    assert num_likely(held, [1], 0.0) == 0


def test_both_sets_are_bounded_and_the_first_blocks_of_a_prompt_stay(
    held: PrefixMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_map, "MAX_REPORTED", 3)
    monkeypatch.setattr(prefix_map, "MAX_EXPECTED", 3)
    held.change([1, 2, 3, 4], [], cleared=False)
    assert held.num_reported([1, 2, 3, 4]) == 3
    held.expect([11, 12, 13, 14], 0.0)
    assert num_likely(held, [11, 12, 13, 14], 0.0) == 3
    held.expect([21, 22], 1.0)
    assert num_likely(held, [11, 12, 13, 14], 1.0) == 1
    assert num_likely(held, [21, 22], 1.0) == 2
