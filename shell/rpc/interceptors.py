"""The interceptor around every handler: the one place where errors become statuses.

A handler ends in one of four ways: it returns, it raises a TandemError (mapped by `status`),
it is cancelled or its peer is gone (there is no status to send), or it has a bug (INTERNAL with an id
that the log explains). The call count is what an ordered drain waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from inspect import isasyncgen
from typing import Any, cast

import grpc
import grpc.aio

from shell.rpc.decoding import decode_request
from shell.rpc.handlers import Context, Continuation, Handler, behaviour_of, with_behaviour
from shell.rpc.status import abort_with, bug_logged, refusal
from shell.telemetry.logging import get_logger
from tandem.errors import InternalError, InvalidRequest, TandemError, UnsupportedOption

_log = get_logger(__name__)


class CallGuard(grpc.aio.ServerInterceptor):
    """Wraps every handler; counts the calls of those that end by themselves.

    `long_lived` names services whose streams end only with the peer; a drain does not wait for them. `writers` are
    methods, by their paths, that write their one response themselves: what they hold, they hold until it has left.
    """

    def __init__(self, long_lived: frozenset[str], writers: frozenset[str] = frozenset()) -> None:
        self._finite = _Count()
        self._all = _Count()
        self._long_lived = long_lived
        self._writers = writers

    async def idle(self) -> None:
        """Returns when no call is running that ends by itself."""
        await self._finite.zero.wait()

    async def ended(self) -> None:
        """Returns when no handler is running."""
        await self._all.zero.wait()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Called by gRPC once per call."""
        handler = await continuation(handler_call_details)
        return NO_SUCH_METHOD if handler is None else self._wrap(handler, handler_call_details.method)

    def _wrap(self, handler: Handler, method: str) -> Handler:
        """To gRPC its requests are a stream, which looks the same on the wire.

        Where the request is to be one message, gRPC never answers a caller that ends its call without one.
        """
        deserialize = handler.request_deserializer
        behaviour = behaviour_of(handler)

        def decode(raw: bytes) -> Any:
            return raw if deserialize is None else decode_request(deserialize, raw)

        async def guarded(requests: AsyncIterator[Any], context: Context) -> Any:
            raw = None
            if not handler.request_streaming:
                messages = cast("AsyncGenerator[Any, None]", aiter(requests))
                async with aclosing(messages):  # gRPC's own generator would keep the message
                    raw = await anext(messages, None)

            async def answer() -> Any:
                nonlocal raw
                if handler.request_streaming:
                    result = behaviour(requests, context)
                elif raw is None:
                    raise InvalidRequest("request", "is missing")
                else:
                    request, raw = decode(raw), None
                    result = behaviour(request, context)
                if not isasyncgen(result):
                    return await result
                async with aclosing(result):  # its `finally` runs now, not when it is collected
                    async for response in result:
                        await context.write(response)
                return None

            return await self._guarded(method, context, answer)

        streams = handler.response_streaming or method in self._writers
        deserializer = decode if handler.request_streaming else None
        return with_behaviour(handler, guarded, streams=streams, request_deserializer=deserializer)

    async def _guarded(self, method: str, context: Context, answer: Callable[[], Awaitable[Any]]) -> Any:
        counts = (self._all,) if method.split("/")[1] in self._long_lived else (self._all, self._finite)
        for count in counts:
            count.add(1)
        try:
            return await answer()
        except TandemError as error:
            await abort_with(context, error)
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling() > 0:  # it is the call that was cancelled
                raise
            _log.exception("handler leaked a cancellation", method=method)  # the caller would wait for ever
            await abort_with(context, InternalError("a step of the call was cancelled"))
        except grpc.aio.BaseError as error:  # a write found the peer gone: the third way of being cancelled
            raise asyncio.CancelledError from error
        except Exception as error:  # noqa: BLE001
            await abort_with(context, bug_logged(_log, "handler failed", error, method=method))
        finally:
            for count in counts:
                count.add(-1)


NO_SUCH_METHOD = refusal(UnsupportedOption("method", "there is no such method here"))
"""Answers calls of methods that the port does not have: gRPC alone would say so without details."""


class _Count:
    """A number with an event that is set while the number is zero."""

    def __init__(self) -> None:
        self.zero = asyncio.Event()
        self.zero.set()
        self._value = 0

    def add(self, change: int) -> None:
        self._value += change
        if self._value == 0:
            self.zero.set()
        else:
            self.zero.clear()
