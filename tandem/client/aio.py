"""The client for asyncio: one channel to a router, used by any number of tasks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tandem.client import results
from tandem.client.caller import CALL_TIMEOUT_S, CLOSED, RETRY_S, Caller
from tandem.client.request import (
    ChatOptions,
    GenerateOptions,
    Message,
    detokenize_request,
    generate_request,
    tokenize_request,
)
from tandem.cluster_status import ClusterStatus
from tandem.convert import status_from_proto
from tandem.errors import DeadlineExceeded, Unavailable
from tandem.rpc.channel import open_channel
from tandem.rpc.google_messages import SERVING, HealthCheckRequest
from tandem.rpc.received_error import error_from_rpc
from tandem.v1 import cluster_pb2, inference_pb2

if TYPE_CHECKING:
    from typing import Self, Unpack  # not in Python 3.10


class AsyncClient(Caller):
    """Calls routers. Raises the exceptions of `tandem.errors`; connects at the first call.

    `timeout_s` of a generating call is the request's deadline, which the server enforces too; None = none.
    """

    _dial = staticmethod(open_channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what is under way, which raises Unavailable, as every later call does."""
        self._closed = True
        await self._channel.close()

    async def generate(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[results.GenerationUpdate, None]:
        """Streams what follows `prompt`, or else `token_ids` or `messages`.

        Closing the iterator early cancels the request.
        """
        request = generate_request(prompt, options)
        async with self._stream(self._inference.Generate, request, timeout_s) as messages:
            async for message in messages:
                yield results.update(message)

    async def complete(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> results.Completion:
        """Generates everything, then returns. Cancelling the task cancels the request."""
        request = inference_pb2.CompleteRequest(generate=generate_request(prompt, options))
        return results.completion(await self._call(self._inference.Complete, request, timeout_s))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = "",
        timeout_s: float = CALL_TIMEOUT_S,
        **options: Unpack[ChatOptions],
    ) -> results.Tokenization:
        """The token ids of a text, or of a conversation as the chat template renders it."""
        request = tokenize_request(text, messages, model, options)
        return results.tokenization(await self._call(self._inference.Tokenize, request, timeout_s))

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
        return str((await self._call(self._inference.Detokenize, request, timeout_s)).text)

    async def model(self, *, timeout_s: float = CALL_TIMEOUT_S) -> results.ServedModel:
        """What is served, and within which limits."""
        request = inference_pb2.GetModelRequest()
        return results.served_model(await self._call(self._inference.GetModel, request, timeout_s))

    async def status(self, *, timeout_s: float = CALL_TIMEOUT_S) -> ClusterStatus:
        """Every worker, pool, queue and transfer that the router knows of."""
        return status_from_proto(await self._call(self._cluster.GetStatus, cluster_pb2.GetStatusRequest(), timeout_s))

    async def drain(self, worker_id: str, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Asks one worker to take no new work and to finish what it has. It stays registered, as draining."""
        await self._call(self._cluster.Drain, cluster_pb2.DrainRequest(worker_id=worker_id), timeout_s)

    async def serving(self, service: str = "", *, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """What the server's health says of one service; "" = of all. False for one that is not there."""
        async with self._stream(self._health, HealthCheckRequest(service=service), timeout_s) as messages:
            async for message in messages:
                return bool(message.status == SERVING)
        return False  # it is ending

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns once the server is SERVING; waits for one that is not there yet.

        Raises DeadlineExceeded after `timeout_s`.
        """
        ends_at_s = time.monotonic() + timeout_s
        why = "it does not say SERVING"
        while (left_s := ends_at_s - time.monotonic()) > 0:
            try:
                async with self._stream(self._health, HealthCheckRequest(), left_s) as messages:
                    async for message in messages:
                        if message.status == SERVING:
                            return
                why = "it is draining"
            except Unavailable as error:
                why = self._passing(error)
            except DeadlineExceeded:
                break
            await asyncio.sleep(min(RETRY_S, max(0.0, ends_at_s - time.monotonic())))
        raise DeadlineExceeded(f"{self._target} is not ready after {timeout_s:g} s: {why}")

    async def _call(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        async with self._translated():
            return await method(request, timeout=timeout_s, metadata=self._metadata())

    @contextlib.asynccontextmanager
    async def _stream(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> AsyncIterator[Any]:
        async with self._translated():
            call = method(request, timeout=timeout_s, metadata=self._metadata())
            try:
                yield call
            finally:
                call.cancel()  # without effect on a call that has ended

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(CLOSED)

    @contextlib.asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        self._check_open()
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            cancelling = getattr(task, "cancelling", int)  # Python 3.10's has none: there the client's end counts
            if self._closed and not cancelling():  # the call was cancelled, not its caller
                raise Unavailable(CLOSED) from None
            raise
