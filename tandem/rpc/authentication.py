"""Bearer tokens at the door of every gRPC server: who brings none is refused before anything is read.

Health is exempt: it tells nothing but whether to call, and Kubernetes' probes cannot bring a token.
Who asks it without one asks little: a probe makes one call, a client that heeds health one Watch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from tandem.errors import Overloaded, Unauthenticated
from tandem.rpc import health
from tandem.rpc.handlers import Context, Handler, behaviour_of, with_behaviour
from tandem.rpc.status import abort_with
from tandem.security.tokens import Tokens

_METADATA_KEY = "authorization"
_EXEMPT = (f"/{health.SERVICE_NAME}/",)
_MAX_EXEMPT_CALLS = 8
"""Without a token, at a time, on one connection."""


class TokenGuard(grpc.aio.ServerInterceptor):
    """Put first among interceptors: it answers instead of the handler."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._exempt_calls: Counter[str] = Counter()
        """By connection."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Called by gRPC once per call."""
        shown = _authorization(handler_call_details)
        if self._tokens.allows(shown):
            return await continuation(handler_call_details)
        if handler_call_details.method.startswith(_EXEMPT):
            handler = await continuation(handler_call_details)
            return None if handler is None else self._limited(handler)
        return _NO_TOKEN if shown is None else _WRONG_TOKEN

    def _limited(self, handler: Handler) -> Handler:
        behaviour = behaviour_of(handler)

        async def limited(request: Any, context: Context) -> Any:
            calls, connection = self._exempt_calls, context.peer()
            if calls[connection] >= _MAX_EXEMPT_CALLS:
                await abort_with(context, Overloaded("too many calls without a token on this connection"))
            calls[connection] += 1
            try:
                return await behaviour(request, context)
            finally:
                calls[connection] -= 1
                if not calls[connection]:
                    del calls[connection]

        return with_behaviour(handler, limited)


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    for key, value in details.invocation_metadata or ():
        if key == _METADATA_KEY:
            return value if isinstance(value, str) else None
    return None


def _refusal(why: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        del requests  # not read: streaming both ways is the one shape that waits for nothing
        await abort_with(context, Unauthenticated(why))

    return grpc.stream_stream_rpc_method_handler(refuse)


_NO_TOKEN = _refusal("a bearer token is needed, in `authorization` metadata")
_WRONG_TOKEN = _refusal("the bearer token is not one of those accepted here")
REFUSALS = (_NO_TOKEN, _WRONG_TOKEN)
"""What this guard answers with, whatever method was asked for."""
