from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.registry import Registry
from router.registry_servicer import RegistryServicer
from tandem.clock import ManualClock
from tandem.convert import info_to_proto
from tandem.types import Role
from tandem.v1 import registry_pb2


class GoneWorker:
    """A call whose worker has left when it is answered."""

    async def write(self, _: registry_pb2.RegisterResponse) -> None:
        raise asyncio.CancelledError


async def test_a_worker_that_leaves_before_it_has_its_lease_leaves_nothing(clock: ManualClock, info: Any) -> None:
    registry = Registry("tiny", "config", clock, lease_s=5.0, stall_s=30.0)
    servicer = RegistryServicer(registry)

    async def introduction() -> AsyncIterator[registry_pb2.RegisterRequest]:
        yield registry_pb2.RegisterRequest(info=info_to_proto(info(Role.DECODE, "d")))

    with pytest.raises(asyncio.CancelledError):
        await servicer.Register(introduction(), GoneWorker())  # type: ignore[arg-type]
    assert registry.views() == []
