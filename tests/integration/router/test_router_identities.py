"""Who a token makes its caller: how far it may go ahead of others, and which workers' names are its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.errors import InvalidRequest, Reason, Unavailable
from tandem.rpc.received_error import error_from_rpc
from tandem.security.options import SecurityConfig
from tandem.types import Role, new_incarnation
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import registry_pb2
from tests.pki import OTHER_TOKEN, TOKEN, Pki

THIRD_TOKEN = "a-third-token-of-the-tests"
PROMPT = pb.TokenIds(ids=[72, 105])


@pytest.fixture
async def cluster(launch: Any, policy: Any, tmp_path: Path) -> Any:
    """A router without workers, that knows two identities by name, and one token without."""
    lines = (f"{TOKEN} name=ours max-priority=5", f"{OTHER_TOKEN} name=theirs", THIRD_TOKEN)
    security = SecurityConfig(token_file=Pki(tmp_path).tokens(*lines))
    return await launch(policy=policy(patience_s=0.01), security=security, max_priority=2)


def with_token(token: str) -> Any:
    return grpc.aio.Metadata(("authorization", f"Bearer {token}"))


@pytest.mark.parametrize(("token", "highest"), [(TOKEN, 5), (OTHER_TOKEN, 2), (THIRD_TOKEN, 2)])
async def test_a_request_goes_ahead_of_others_as_far_as_its_token_lets_it(
    cluster: Any, token: str, highest: int
) -> None:
    async def refusal(priority: int) -> Any:
        request = pb.GenerateRequest(token_ids=PROMPT, priority=priority)
        error, _, _ = await cluster.error_of(cluster.inference.Generate(request, metadata=with_token(token)))
        return error

    for priority in (highest, 0, -(2**31)):
        assert isinstance(await refusal(priority), Unavailable)  # it would have been run
    for priority in (highest + 1, 2**31 - 1):
        error = await refusal(priority)
        assert isinstance(error, InvalidRequest)
        assert (error.field, f"above {highest}" in error.message) == ("priority", True)


async def test_without_tokens_nobody_goes_ahead_of_others_unless_the_operator_says_so(launch: Any) -> None:
    cluster = await launch()
    await cluster.add_pair()
    request = pb.GenerateRequest(token_ids=PROMPT, sampling=pb.SamplingParams(max_tokens=2), priority=1)
    error, code, _ = await cluster.error_of(cluster.inference.Generate(request))
    assert (code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "priority")
    request.priority = -7
    assert len(await cluster.read_tokens(cluster.inference.Generate(request))) == 2


async def test_a_workers_name_belongs_to_the_identity_that_registered_it_until_it_is_gone(cluster: Any) -> None:
    mine = cluster.worker_info(Role.DECODE, "d", address="127.0.0.1:1")
    stranger = replace(mine, incarnation=new_incarnation())

    def registered() -> list[Any]:
        return [view.info for view in cluster.router.workers.views()]

    holder = cluster.register(mine, with_token(TOKEN))
    assert isinstance(await holder.read(), registry_pb2.RegisterResponse)
    for claim in (stranger, mine):
        for token in (OTHER_TOKEN, THIRD_TOKEN):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.register(claim, with_token(token)).read()
            assert error_from_rpc(caught.value).reason is Reason.WORKER_ID_TAKEN
    assert registered() == [mine]
    holder.cancel()
    await cluster.until(lambda: not registered())
    successor = cluster.register(stranger, with_token(OTHER_TOKEN))
    assert isinstance(await successor.read(), registry_pb2.RegisterResponse)
    assert registered() == [stranger]
    successor.cancel()
