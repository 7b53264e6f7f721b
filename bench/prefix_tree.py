"""What the prefix cache costs the event loop: `python -m bench.prefix_tree`.

Per 1,000 tokens of a prompt, for block sizes and lengths: looking for it, taking what was found into a sequence's table
(a hit), giving it back, making it known, and evicting it block by block as a growing sequence does. The pool is full of
other prompts that begin alike, and every prompt is met once. Time of the thread itself, so that a busy machine disturbs
less.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable

from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from engine.sequence import TokenArray, new_block_table, new_token_array
from tandem.types import TokenId

_VOCAB_SIZE = 150_000
_NUM_OTHERS = 64


def _tokens(rng: random.Random, num_tokens: int, stem: Iterable[TokenId] = ()) -> TokenArray:
    return new_token_array([*stem, *(TokenId(rng.randrange(_VOCAB_SIZE)) for _ in range(num_tokens))])


def _us(call: Callable[[], object]) -> float:
    began_s = time.thread_time()
    call()
    return (time.thread_time() - began_s) * 1e6


def _remember(cache: PrefixCache, tokens: TokenArray) -> float:
    blocks = cache.allocate(len(tokens) // cache.pool.block_size)
    us = _us(lambda: cache.insert("", tokens, blocks))
    cache.pool.release(blocks)
    return us


def costs_us(block_size: int, num_tokens: int, repeats: int) -> tuple[float, ...]:
    """Microseconds per 1,000 tokens, medians: match, hit, release, insert, evict."""
    rng = random.Random(0)
    stem = _tokens(rng, num_tokens // 2)
    num_blocks = 4 * num_tokens // block_size + 1
    cache = PrefixCache(BlockPool(num_blocks, block_size))
    for _ in range(_NUM_OTHERS):
        _remember(cache, _tokens(rng, num_tokens // 16, stem))
    costs = [_costs_us(cache, _tokens(rng, num_tokens - len(stem), stem)) for _ in range(repeats)]
    return tuple(statistics.median(each) * 1000 / num_tokens for each in zip(*costs, strict=True))


def _costs_us(cache: PrefixCache, tokens: TokenArray) -> tuple[float, ...]:
    insert = _remember(cache, tokens)
    match = _us(lambda: cache.match("", tokens))
    table = new_block_table()
    hit = _us(lambda: table.extend(new_block_table(cache.acquire("", tokens))))
    release = _us(lambda: cache.pool.release(table))
    taken = list(cache.allocate(cache.pool.num_free))
    num_evicted = max(1, 1000 // cache.pool.block_size)
    evict = _us(lambda: taken.extend([cache.allocate(1)[0] for _ in range(num_evicted)]))
    cache.pool.release(taken)
    return match, hit, release, insert, evict * len(tokens) / (num_evicted * cache.pool.block_size)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    print("µs per 1,000 tokens", "| block size | prompt tokens | match | hit | release | insert | evict |", sep="\n")
    print("|---" * 7 + "|")
    for block_size in (1, 16, 256):
        for num_tokens in (1024, 8192, 131_072):
            costs = costs_us(block_size, num_tokens, repeats if num_tokens < 100_000 else 3)
            print(f"| {block_size} | {num_tokens} | " + " | ".join(f"{each:.1f}" for each in costs) + " |", flush=True)


if __name__ == "__main__":
    main()
