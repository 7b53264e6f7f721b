"""The client for threads and scripts: gRPC's own blocking stubs, no event loop. Thread-safe."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from typing import Self, Unpack

import grpc
import grpc.aio

from tandem.client import response
from tandem.client.aio import CALL_TIMEOUT_S, CLOSED, RETRY_S
from tandem.client.request import GenerateOptions, Message, detokenize_request, generate_request, tokenize_request
from tandem.client.results import Completion, GenerationUpdate, ServedModel, Tokenization
from tandem.client.service_config import service_config_options
from tandem.client.tracing import trace_metadata
from tandem.cluster_status import ClusterStatus
from tandem.config import DEFAULT_ADDRESS, ClientSecurityConfig
from tandem.convert import status_from_proto
from tandem.errors import DeadlineExceeded, Reason, Unavailable
from tandem.rpc.channel import CONNECT_TIMEOUT_S, open_blocking_channel
from tandem.rpc.google_messages import SERVING, HealthCheckRequest, health_watch
from tandem.rpc.received_error import error_from_rpc
from tandem.security.credentials import Outgoing
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc


class Client:
    """Calls routers. Raises the exceptions of `tandem.errors`; connects at the first call.

    `target` is `HOST:PORT`, `dns:///NAME:PORT` or `ipv4:HOST:PORT,HOST:PORT`; calls are spread over all
    of its addresses, and go to another one where a router is not there or drains.

    `timeout_s` of a generating call is the request's deadline, which the server enforces too;
    None = none. A server that cannot be reached is Unavailable after `connect_timeout_s`.

    `security` names files: certificates are read now, tokens again when their file changes. Raises
    ConfigError if one is no good, or if a token would cross a network in clear.
    """

    def __init__(
        self,
        target: str = DEFAULT_ADDRESS,
        *,
        security: ClientSecurityConfig | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self._target = target
        self._closed = False
        self._outgoing = Outgoing.of_client(security or ClientSecurityConfig(), target)
        self._channel = open_blocking_channel(
            target,
            self._outgoing,
            connect_timeout_s=connect_timeout_s,
            more_options=service_config_options(target),
        )
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._cluster = cluster_pb2_grpc.ClusterServiceStub(self._channel)
        self._health = health_watch(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is under way, which raises Unavailable, as every later call does."""
        self._closed = True
        self._channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generator[GenerationUpdate, None, None]:
        """Streams what follows `prompt`, or else `token_ids` or `messages`.

        Closing the iterator early cancels the request.
        """
        request = generate_request(prompt, options)
        with self._translated():
            call = self._inference.Generate(request, timeout=timeout_s, metadata=self._metadata())
            try:
                for message in call:
                    yield response.update(message)
            finally:
                call.cancel()  # without effect on a call that has ended

    def complete(
        self,
        prompt: str | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Generates everything, then returns."""
        request = generate_request(prompt, options)
        with self._translated():
            return response.completion(
                self._inference.Complete(
                    inference_pb2.CompleteRequest(generate=request),
                    timeout=timeout_s,
                    metadata=self._metadata(),
                )
            )

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = "",
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Tokenization:
        """The token ids of a text, or of a conversation as the chat template renders it."""
        request = tokenize_request(text, messages, model)
        with self._translated():
            return response.tokenization(
                self._inference.Tokenize(request, timeout=timeout_s, metadata=self._metadata())
            )

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        model: str = "",
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> str:
        """The text of token ids."""
        request = detokenize_request(token_ids, skip_special_tokens, model)
        with self._translated():
            return str(self._inference.Detokenize(request, timeout=timeout_s, metadata=self._metadata()).text)

    def model(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ServedModel:
        """What is served, and within which limits."""
        with self._translated():
            return response.served_model(
                self._inference.GetModel(inference_pb2.GetModelRequest(), timeout=timeout_s, metadata=self._metadata())
            )

    def status(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ClusterStatus:
        """Every worker, pool, queue and transfer that the router knows of."""
        with self._translated():
            return status_from_proto(
                self._cluster.GetStatus(cluster_pb2.GetStatusRequest(), timeout=timeout_s, metadata=self._metadata())
            )

    def drain(self, worker_id: str, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Asks one worker to take no new work, finish what it has, and leave."""
        with self._translated():
            self._cluster.Drain(
                cluster_pb2.DrainRequest(worker_id=worker_id), timeout=timeout_s, metadata=self._metadata()
            )

    def serving(self, service: str = "", *, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """What the server's health says of one service; "" = of all. False for one that is not there."""
        request = HealthCheckRequest(service=service)
        with self._translated():
            call = self._health(request, timeout=timeout_s, metadata=self._metadata())
            try:
                return any(message.status == SERVING for message in islice(call, 1))
            finally:
                call.cancel()

    def wait_ready(self, timeout_s: float) -> None:
        """Returns once the server is SERVING; waits for one that is not there yet.

        Raises DeadlineExceeded after `timeout_s`.
        """
        ends_at_s = time.monotonic() + timeout_s
        why = "it does not say SERVING"
        while (left_s := ends_at_s - time.monotonic()) > 0:
            try:
                if self._watch_until_serving(left_s):
                    return
                why = "it is draining"
            except Unavailable as error:
                if error.reason is Reason.TLS_FAILED:  # waiting does not mend it
                    raise
                why = error.message
            except DeadlineExceeded:
                break
            time.sleep(min(RETRY_S, max(0.0, ends_at_s - time.monotonic())))
        raise DeadlineExceeded(f"{self._target} is not ready after {timeout_s:g} s: {why}")

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Of one call: the token as it is now, and the caller's trace if there is one."""
        return (*self._outgoing.metadata(), *trace_metadata())

    def _watch_until_serving(self, timeout_s: float) -> bool:
        """False if the server ended the watch, as one that drains does."""
        with self._translated():
            call = self._health(HealthCheckRequest(), timeout=timeout_s, metadata=self._metadata())
            try:
                return any(message.status == SERVING for message in call)
            finally:
                call.cancel()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """The one place where this client's gRPC errors become ours."""
        try:
            yield
        except grpc.RpcError as error:
            if self._closed:
                raise Unavailable(CLOSED) from error
            failed = grpc.aio.AioRpcError(error.code(), grpc.aio.Metadata(), _aio_metadata(error), error.details())
            raise error_from_rpc(failed) from error
        except ValueError as error:
            if self._closed:  # how gRPC refuses a call
                raise Unavailable(CLOSED) from error
            raise


def _aio_metadata(error: grpc.RpcError) -> grpc.aio.Metadata:
    return grpc.aio.Metadata(*((each.key, each.value) for each in error.trailing_metadata() or ()))
