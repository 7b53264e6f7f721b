"""Who is told of a worker's cache, by its options."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import zmq

from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache
from shell.config import PrefillConfig
from tandem.errors import ConfigError
from tandem.types import Role, TokenId
from worker.serving.app import Foundation
from worker.serving.cache_reports import CacheNews

CONFIG = PrefillConfig()
TOKENS = tuple(map(TokenId, range(8)))


def telling(cache: PrefixCache, **options: Any) -> Any:
    nothing: Any = None
    base = Foundation(Role.PREFILL, replace(CONFIG, **options), *[nothing] * 9)
    return base._telling_of(cache)


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(BlockPool(8, 4))


def store(cache: PrefixCache) -> list[int]:
    """Two blocks; returns their names."""
    blocks = cache.allocate(2)
    cache.insert("", TOKENS, blocks)
    cache.pool.release(blocks)
    return cache.hashes()


async def test_routers_are_told_what_is_cached_and_what_was_before(cache: PrefixCache) -> None:
    with telling(cache) as reports:
        early, late = (CacheNews(lambda: None) for _ in range(2))
        with reports.telling(early):
            names = store(cache)
            with reports.telling(late):
                told = [[*each.stored] for news in (early, late) if (each := news.take()) is not None]
    assert told == [names, names]


async def test_subscribers_are_told_beside_routers(cache: PrefixCache, tmp_path: Any) -> None:
    address = f"ipc://{tmp_path}/replay"
    with (
        zmq.Context() as context,
        telling(cache, kv_events=(f"ipc://{tmp_path}/events", address)),
        context.socket(zmq.DEALER) as asker,
    ):
        names = store(cache)
        await asyncio.sleep(0)
        asker.connect(address)
        asker.send_multipart([b"", bytes(8)])
        assert asker.poll(10_000)
        _, number, payload = asker.recv_multipart()
    assert number == bytes(8)
    ((stored,),) = [events for _, events, _ in [msgpack.unpackb(payload)]]
    assert stored["block_hashes"] == names
    assert stored["token_ids"] == list(TOKENS)
    assert stored["parent_block_hash"] is None


async def test_without_a_cache_nobody_is_told(cache: PrefixCache) -> None:
    with telling(cache, prefix_cache=False) as reports:
        assert reports is None
        assert cache.listener is None


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"kv_events": ("tcp://127.0.0.1:1",), "prefix_cache": False}, "--kv-events: needs --prefix-cache"),
    ],
)
def test_options_that_do_not_fit_are_refused(cache: PrefixCache, options: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=option), telling(cache, **options):
        pass
