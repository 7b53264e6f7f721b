"""Reports every call that a handler answers to an observer, with the status that it ended with.

The outermost interceptor, so that calls refused by the others are counted, too. A method without a handler may be
the caller's invention: it is reported as `NO_METHOD`, or not at all, since methods become label values of metrics.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any, Protocol

import grpc
import grpc.aio

from tandem.rpc.handlers import Context, Handler, behaviour_of, telling_end, with_behaviour

NO_METHOD = "/none/none"
"""Reported instead of the method of a call that was refused unread."""


class CallObserver(Protocol):
    """Called on the event loop; must neither await nor raise."""

    def began(self, method: str) -> None:
        """A call of `/package.Service/Method` came in."""
        ...

    def ended(self, method: str, code: str) -> None:
        """It ended with this status, such as `OK`; once for each `began`."""
        ...


class CallCounting(grpc.aio.ServerInterceptor):
    """Expects handlers that write their streams, as those of `CallGuard` do."""

    def __init__(self, observer: CallObserver, refusals: Collection[Handler] = ()) -> None:
        """`refusals`: handlers that other interceptors answer with, whatever method was asked for."""
        self._observer = observer
        self._refusals = refusals

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Called by gRPC once per call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        refused = any(handler is each for each in self._refusals)
        return self._wrap(handler, NO_METHOD if refused else handler_call_details.method)

    def _wrap(self, handler: Handler, method: str) -> Handler:
        behaviour = behaviour_of(handler)

        async def counted(request: Any, context: Context) -> Any:
            self._observer.began(method)
            with telling_end(context, lambda code: self._observer.ended(method, code.name)):
                return await behaviour(request, context)

        return with_behaviour(handler, counted)
