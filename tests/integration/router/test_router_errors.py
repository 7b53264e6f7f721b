"""Errors of every method of a router's port: an answer, and details with it, whatever was sent."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tandem.errors import InvalidRequest, TandemError, UnsupportedOption
from tandem.foreign import kserve_pb2, vllm_engine_pb2
from tandem.rpc.received_error import error_from_rpc
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, registry_pb2

TIMEOUT_S = 20.0
NOT_A_MESSAGE = b"\xff" * 8
FILES = (inference_pb2, cluster_pb2, registry_pb2, kserve_pb2, vllm_engine_pb2)
METHODS: list[Any] = [
    method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods_by_name.values()
]


def path_of(method: Any) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


async def error_of(cluster: Any, path: str, *messages: bytes) -> tuple[grpc.StatusCode, TandemError | None]:
    """The call's status; the error in its details, None without. The caller is done after these messages."""
    call = cluster.channel.stream_stream(path)(timeout=TIMEOUT_S)
    try:
        for message in messages:  # it may be refused before
            await call.write(message)
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        if "grpc-status-details-bin" in dict(error.trailing_metadata() or ()):
            return error.code(), error_from_rpc(error)
        return error.code(), None
    return grpc.StatusCode.OK, None


@pytest.mark.parametrize("method", METHODS, ids=path_of)
async def test_what_is_no_message_is_refused_with_details(cluster: Any, method: Any) -> None:
    code, error = await error_of(cluster, path_of(method), NOT_A_MESSAGE)

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error, InvalidRequest)


@pytest.mark.parametrize("method", [each for each in METHODS if not each.client_streaming], ids=path_of)
async def test_a_call_without_its_request_is_refused_with_details(cluster: Any, method: Any) -> None:
    code, error = await error_of(cluster, path_of(method))

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error, InvalidRequest)
    assert error.field == "request"


@pytest.mark.parametrize("path", ["/tandem.v1.InferenceService/None", "/no.such.Service/Method"])
async def test_a_method_that_is_not_there_is_refused_with_details(cluster: Any, path: str) -> None:
    code, error = await error_of(cluster, path, b"")

    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert isinstance(error, UnsupportedOption)


@pytest.mark.parametrize("name", ["x" * 20_000, "é" * 10_000, "\x00" * 20_000], ids=["ascii", "utf-8", "escaped"])
async def test_a_long_name_of_a_worker_is_cut_in_the_error(cluster: Any, name: str) -> None:
    stub: Any = cluster_pb2_grpc.ClusterServiceStub(cluster.channel)

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Drain(cluster_pb2.DrainRequest(worker_id=name), timeout=TIMEOUT_S)

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = error_from_rpc(refused.value)
    assert isinstance(error, InvalidRequest)
    assert error.field == "worker_id"
    assert error.message.endswith("…")
