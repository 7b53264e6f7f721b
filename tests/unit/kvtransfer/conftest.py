"""A listener, pools in shared memory, and the stand-in for the CUDA driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.kv_ends import Recorder
from tests.standins.cuda import StandInCuda, fresh
from tests.transports import SharedPool


@pytest.fixture
def cuda() -> Iterator[StandInCuda]:
    """The stand-in for the CUDA driver: its settings are this test's, and nothing of it may be left over."""
    with fresh() as standin:
        yield standin


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def make_pool() -> Iterator[Callable[..., SharedPool]]:
    pools: list[SharedPool] = []

    def make(*args: int) -> SharedPool:
        pools.append(SharedPool(*args))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
