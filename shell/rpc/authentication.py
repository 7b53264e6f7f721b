"""Bearer tokens: every gRPC call without a valid one is refused before its request is read.

Handlers learn by `caller_identity` whose token it was. Health is exempt, within `bounds`: it reports only whether to
call, and Kubernetes' probes cannot bring a token.
"""

from __future__ import annotations

from contextvars import ContextVar

import grpc
import grpc.aio

from shell.rpc import health
from shell.rpc.bounds import TokenlessCalls
from shell.rpc.handlers import Continuation, Handler
from shell.rpc.interceptors import NO_SUCH_METHOD
from shell.rpc.status import refusal
from tandem.errors import Unauthenticated
from tandem.security.tokens import Identity, Tokens

_METADATA_KEY = "authorization"
_EXEMPT = (f"/{health.SERVICE_NAME}/",)
_NOBODY = Identity()
_IDENTITY: ContextVar[Identity] = ContextVar("identity", default=_NOBODY)
"""Identity of each call in its own task: gRPC runs interceptors and handler in the same task."""


def caller_identity() -> Identity:
    """Whose token the call brought that this task answers; that of nobody in particular where none is asked for."""
    return _IDENTITY.get()


class TokenGuard(grpc.aio.ServerInterceptor):
    """First of the interceptors: answers instead of the handler."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._tokenless = TokenlessCalls()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Called by gRPC once per call."""
        shown = _authorization(handler_call_details)
        identity = self._tokens.identify(shown)
        if identity is not None:
            _IDENTITY.set(identity)
            return await continuation(handler_call_details)
        if handler_call_details.method.startswith(_EXEMPT):
            handler = await continuation(handler_call_details)
            # A method that is not there takes no request; it is counted by its refusal, not by a name of the caller's.
            return handler if handler in {None, NO_SUCH_METHOD} else self._tokenless.bounded(handler)
        return _NO_TOKEN if shown is None else _WRONG_TOKEN


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    for key, value in details.invocation_metadata or ():
        if key == _METADATA_KEY:
            return value if isinstance(value, str) else None
    return None


_NO_TOKEN = refusal(Unauthenticated("a bearer token is needed, in `authorization` metadata: give --token-file"))
_WRONG_TOKEN = refusal(
    Unauthenticated(
        "the bearer token is not one of those accepted here: take one of the file that the server was given "
        "by --token-file"
    )
)
REFUSALS = (_NO_TOKEN, _WRONG_TOKEN)
"""What this guard answers with, whatever method was asked for."""
