"""The short form of `tests.fuzz.transfer`, over every transport; its seed is another one each time, and told."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtransfer.base import PoolMemory
from tests.fuzz.transfer import fuzz
from tests.transports import EVERY, make_pool

NUM_CASES = 150


@pytest.mark.parametrize("transport", EVERY)
async def test_hostile_peers_bring_nothing_but_transfer_errors(transport: str) -> None:
    @contextmanager
    def memory() -> Iterator[PoolMemory]:
        pool = make_pool(transport)
        yield pool.memory
        pool.close()

    seed = secrets.randbelow(10**6)
    outcomes, violations = await fuzz(transport, seed, range(NUM_CASES), memory)
    assert violations == []
    assert sum(outcomes.values()) == NUM_CASES
