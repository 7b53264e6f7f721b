"""Hashes that are made in pieces are those that are made at once."""

from __future__ import annotations

import asyncio
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import block_names
from engine.block_pool import BlockPool
from engine.host_tier import HostTier
from engine.prefix_cache import PrefixCache
from shell.prefix_hash import block_hashes, salt_hash

SIZE, NUM_BLOCKS = 2, 12


class Recorder:
    def __init__(self) -> None:
        self.held: list[int] = []

    def stored(self, cache_salt, parent_hash, hashes, token_ids) -> None:
        assert parent_hash is None or parent_hash in self.held, "told before what is above it"
        assert len(token_ids) == len(hashes) * SIZE
        self.held += hashes

    def removed(self, hashes) -> None:
        for each in hashes:
            self.held.remove(each)

    def cleared(self) -> None:
        self.held.clear()


def known(cache: PrefixCache) -> list[int]:
    """Hashes of all that the tree knows, by the definition."""
    found: list[int] = []
    for salt, root in cache._tree._roots.items():
        above = [(b"", child) for child in root.children.values()]
        while above:
            before, node = above.pop()
            tokens = before + node.edge
            found += block_hashes(salt_hash(salt), tokens, SIZE)[-len(node.places) :]
            above += [(tokens, child) for child in node.children.values()]
    return found


async def walk(seed: int, *, num_rows: int) -> None:
    rng, heard = random.Random(seed), Recorder()
    pool = BlockPool(NUM_BLOCKS, SIZE)
    cache = PrefixCache(pool, tier=HostTier(num_rows, 1) if num_rows else None, listener=heard)
    for _ in range(rng.randint(1, 40)):
        salt, tokens = rng.choice(("", "one")), tuple(rng.randint(0, 1) for _ in range(rng.randint(2, 14)))
        match rng.randint(0, 9):
            case 0 | 1:
                await asyncio.sleep(0)
            case 2:
                cache.forget(salt, tokens)
            case 3:
                pool.release(cache.allocate(rng.randint(1, cache.num_available)))
            case 4 if rng.random() < 0.3:
                cache.clear()
            case _:
                blocks = cache.acquire(salt, tokens)
                missing = min(len(tokens) // SIZE - len(blocks), cache.num_available)
                table = (*blocks, *cache.allocate(missing))
                cache.take_moves()
                cache.step_ended(failed=False)
                cache.insert(salt, tokens, table)
                pool.release(table)
        assert sorted(heard.held) == sorted(cache.hashes())
        assert set(heard.held) <= set(known(cache))
        cache.check_invariants()
    while cache._tree.unnamed:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert sorted(heard.held) == sorted(cache.hashes()) == sorted(known(cache))


@pytest.mark.parametrize("num_rows", [0, 4])
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_meanwhile_all_that_stays_is_told_by_its_hash(num_rows: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_names, "PIECE", 1)
        asyncio.run(walk(seed, num_rows=num_rows))


def test_with_no_loop_all_are_hashed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_names, "PIECE", 1)
    heard, pool = Recorder(), BlockPool(NUM_BLOCKS, SIZE)
    cache = PrefixCache(pool, listener=heard)

    cache.insert("", tuple(range(8)), pool.allocate(4))

    assert heard.held == block_hashes(salt_hash(""), array("I", range(8)).tobytes(), SIZE)
