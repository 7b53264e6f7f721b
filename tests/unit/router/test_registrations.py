from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router.faces.tandem.cluster import RegistryServicer
from router.workers import Workers
from tandem.convert import info_to_proto
from tandem.errors import InvalidRequest
from tandem.security.credentials import Outgoing
from tandem.security.tokens import Tokens
from tandem.types import Role, WorkerInfo
from tandem.v1 import registry_pb2
from tests.pki import Pki


class GoneWorker:
    """A call whose worker has left when it is answered."""

    async def write(self, _: registry_pb2.RegisterResponse) -> None:
        raise asyncio.CancelledError


async def test_a_worker_that_leaves_before_it_has_its_lease_leaves_nothing(workers: Workers, info: Any) -> None:
    servicer = RegistryServicer(workers, Outgoing())

    with pytest.raises(asyncio.CancelledError):
        await servicer.Register(introduction(info(Role.DECODE, "d")), GoneWorker())  # type: ignore[arg-type]
    assert workers.views() == []


async def test_a_worker_to_whom_the_routers_token_would_go_in_clear_is_refused(
    workers: Workers, info: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servicer = RegistryServicer(workers, Outgoing(None, Tokens(Pki(tmp_path).tokens())))
    elsewhere = info(Role.DECODE, "d", address="192.0.2.1:1")

    with pytest.raises(InvalidRequest, match="in clear") as refused:
        await servicer.Register(introduction(elsewhere), GoneWorker())  # type: ignore[arg-type]
    assert refused.value.field == "info.address"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert workers.views() == []


async def introduction(worker: WorkerInfo) -> AsyncIterator[registry_pb2.RegisterRequest]:
    yield registry_pb2.RegisterRequest(info=info_to_proto(worker))
