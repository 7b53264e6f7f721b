"""A scripted router behind real gRPC, on a thread of its own so that both clients can call it."""

# ruff: noqa: N802  (the names are gRPC's)

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from tandem.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc, registry_pb2

DEADLINE_S = 10.0


class FakeRouter(inference_pb2_grpc.InferenceServiceServicer, cluster_pb2_grpc.ClusterServiceServicer):
    """Answers from a script and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: list[dict[str, Any]] = []
        """Of calls that generate."""
        self.responses: list[inference_pb2.GenerateResponse] = []
        self.endless = False
        self.text = "once"
        """Of a completion."""
        self.error: status_pb2.Status | None = None
        self.stream_ended = threading.Event()

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append({each.key: each.value for each in context.invocation_metadata()})
        context.add_callback(self.stream_ended.set)
        yield from self.responses
        if self.endless:
            self.stream_ended.wait(DEADLINE_S)
        if self.error is not None:
            context.abort_with_status(rpc_status.to_status(self.error))

    def Complete(self, request: Any, context: grpc.ServicerContext) -> inference_pb2.CompleteResponse:
        self.requests.append(request)
        self.metadata.append({each.key: each.value for each in context.invocation_metadata()})
        choice = inference_pb2.Choice(
            text=self.text, token_ids=[5], stop_token_id=5, finish_reason="FINISH_REASON_STOP"
        )
        return inference_pb2.CompleteResponse(request_id="r", choices=[choice], usage={"prompt_tokens": 2})

    def Tokenize(self, request: Any, context: grpc.ServicerContext) -> inference_pb2.TokenizeResponse:
        self.requests.append(request)
        return inference_pb2.TokenizeResponse(token_ids=[1, 2], tokens=["a", "b"])

    def Detokenize(self, request: Any, context: grpc.ServicerContext) -> inference_pb2.DetokenizeResponse:
        self.requests.append(request)
        return inference_pb2.DetokenizeResponse(text="ab")

    def GetModel(self, request: Any, context: grpc.ServicerContext) -> inference_pb2.GetModelResponse:
        return inference_pb2.GetModelResponse(
            model="demo", family="llama", vocab_size=9, eos_token_ids=[3], limits={"max_logprobs": 20}
        )

    def GetStatus(self, request: Any, context: grpc.ServicerContext) -> cluster_pb2.GetStatusResponse:
        worker = cluster_pb2.WorkerStatus(
            info=registry_pb2.WorkerInfo(worker_id="decode-0", role="WORKER_ROLE_DECODE", pid=7),
            load=registry_pb2.WorkerLoad(running_seqs=3, pool={"total_blocks": 10, "free_blocks": 4}),
            heartbeat_age_seconds=0.5,
            connected=True,
        )
        return cluster_pb2.GetStatusResponse(model="demo", ready=True, workers=[worker])

    def Drain(self, request: Any, context: grpc.ServicerContext) -> cluster_pb2.DrainResponse:
        self.requests.append(request)
        return cluster_pb2.DrainResponse()


class FakeServer:
    """The router's process."""

    def __init__(self) -> None:
        self.router = FakeRouter()
        self._health = health.HealthServicer()
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.router, self._server)
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(self.router, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        self.set_serving(True)

    def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        self._health.set("", status)

    def stop(self) -> None:
        self._server.stop(None).wait()


def failure(code: int, reason: str, message: str, field: str = "") -> status_pb2.Status:
    """A status as a router makes it."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(domain="tandem", reason=reason, metadata={"field": field}))
    return status_pb2.Status(code=code, message=message, details=[detail])


@pytest.fixture
def invalid_top_p() -> status_pb2.Status:
    return failure(code_pb2.INVALID_ARGUMENT, "INVALID_FIELD", "sampling.top_p: not in (0, 1]", "sampling.top_p")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    running = FakeServer()
    yield running
    running.stop()
