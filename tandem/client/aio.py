"""The client for asyncio: one channel to a router, used by any number of tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Self, Unpack

import grpc
import grpc.aio

from tandem.client import response
from tandem.client.request import GenerateOptions, Message, detokenize_request, generate_request, tokenize_request
from tandem.client.results import Completion, GenerationUpdate, ServedModel, Tokenization
from tandem.client.service_config import service_config_options
from tandem.client.tracing import trace_metadata
from tandem.cluster_status import ClusterStatus
from tandem.config import DEFAULT_ADDRESS, ClientSecurityConfig
from tandem.convert import status_from_proto
from tandem.errors import DeadlineExceeded, Reason, Unavailable
from tandem.rpc.channel import CONNECT_TIMEOUT_S, open_channel
from tandem.rpc.google_messages import SERVING, HealthCheckRequest, health_watch
from tandem.rpc.received_error import error_from_rpc
from tandem.security.credentials import Outgoing
from tandem.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc

CALL_TIMEOUT_S = 10.0
"""For calls that do not generate, where the caller names no time."""
RETRY_S = 0.1
"""Between two looks at a server that is not ready."""
CLOSED = "this client was closed"


class AsyncClient:
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
        self._channel = open_channel(
            target,
            self._outgoing,
            connect_timeout_s=connect_timeout_s,
            more_options=service_config_options(target),
        )
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._cluster = cluster_pb2_grpc.ClusterServiceStub(self._channel)
        self._health = health_watch(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what is under way, which raises Unavailable, as every later call does."""
        self._closed = True
        await self._channel.close()

    async def generate(
        self,
        prompt: str | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[GenerationUpdate, None]:
        """Streams what follows `prompt`, or else `token_ids` or `messages`.

        Closing the iterator early cancels the request.
        """
        request = generate_request(prompt, options)
        async with self._translated():
            call = self._inference.Generate(request, timeout=timeout_s, metadata=self._metadata())
            try:
                async for message in call:
                    yield response.update(message)
            finally:
                call.cancel()  # without effect on a call that has ended

    async def complete(
        self,
        prompt: str | None = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Generates everything, then returns. Cancelling the task cancels the request."""
        request = generate_request(prompt, options)
        async with self._translated():
            return response.completion(
                await self._inference.Complete(
                    inference_pb2.CompleteRequest(generate=request),
                    timeout=timeout_s,
                    metadata=self._metadata(),
                )
            )

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = "",
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Tokenization:
        """The token ids of a text, or of a conversation as the chat template renders it."""
        request = tokenize_request(text, messages, model)
        async with self._translated():
            return response.tokenization(
                await self._inference.Tokenize(request, timeout=timeout_s, metadata=self._metadata())
            )

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        model: str = "",
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> str:
        """The text of token ids."""
        request = detokenize_request(token_ids, skip_special_tokens, model)
        async with self._translated():
            return str((await self._inference.Detokenize(request, timeout=timeout_s, metadata=self._metadata())).text)

    async def model(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ServedModel:
        """What is served, and within which limits."""
        async with self._translated():
            return response.served_model(
                await self._inference.GetModel(
                    inference_pb2.GetModelRequest(), timeout=timeout_s, metadata=self._metadata()
                )
            )

    async def status(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ClusterStatus:
        """Every worker, pool, queue and transfer that the router knows of."""
        async with self._translated():
            return status_from_proto(
                await self._cluster.GetStatus(
                    cluster_pb2.GetStatusRequest(), timeout=timeout_s, metadata=self._metadata()
                )
            )

    async def drain(self, worker_id: str, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Asks one worker to take no new work, finish what it has, and leave."""
        async with self._translated():
            await self._cluster.Drain(
                cluster_pb2.DrainRequest(worker_id=worker_id), timeout=timeout_s, metadata=self._metadata()
            )

    async def serving(self, service: str = "", *, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """What the server's health says of one service; "" = of all. False for one that is not there."""
        request = HealthCheckRequest(service=service)
        async with self._translated():
            call = self._health(request, timeout=timeout_s, metadata=self._metadata())
            try:
                async for message in call:
                    return bool(message.status == SERVING)
            finally:
                call.cancel()
        return False  # it is ending

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns once the server is SERVING; waits for one that is not there yet.

        Raises DeadlineExceeded after `timeout_s`.
        """
        why = "it does not say SERVING"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await self._watch_until_serving()
                        return
                    except Unavailable as error:
                        if error.reason is Reason.TLS_FAILED:  # waiting does not mend it
                            raise
                        why = error.message
                    await asyncio.sleep(RETRY_S)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._target} is not ready after {timeout_s:g} s: {why}") from error

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Of one call: the token as it is now, and the caller's trace if there is one."""
        return (*self._outgoing.metadata(), *trace_metadata())

    async def _watch_until_serving(self) -> None:
        """Raises Unavailable if the server is not there, or ended the watch, as one that drains does."""
        async with self._translated():
            call = self._health(HealthCheckRequest(), metadata=self._metadata())
            try:
                async for message in call:
                    if message.status == SERVING:
                        return
            finally:
                call.cancel()
        raise Unavailable("it is draining", Reason.DRAINING)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(CLOSED)

    @contextlib.asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        """The one place where this client's gRPC errors become ours."""
        self._check_open()
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):  # the call was cancelled, not its caller
                raise Unavailable(CLOSED) from None
            raise
