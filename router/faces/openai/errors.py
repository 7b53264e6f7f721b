"""Errors as HTTP answers: one table from exception to status, and the shapes of OpenAI's and Anthropic's errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from shell.http.server import NoRoute
from tandem import errors
from tandem.errors import Reason, TandemError

_STATUSES: Mapping[type[TandemError], int] = {
    errors.TandemError: 500,
    errors.InvalidRequest: 400,
    errors.UnsupportedOption: 400,
    errors.ModelNotFound: 404,
    errors.Unauthenticated: 401,
    errors.Overloaded: 429,
    errors.Unavailable: 503,
    errors.PrefixNotHeld: 503,
    errors.DeadlineExceeded: 504,
}
"""Statuses of classes; a class that is missing has the status of its nearest base."""
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Error types of both APIs by status; other client errors are invalid requests, all else the server's."""
_OF_SAMPLING = re.compile(r"^(sampling|chat|token_ids)\.")
_NAMES = {
    "ids": "prompt",
    "text": "prompt",
    "chat": "messages",
    "json_schema": "response_format",
    "template_variables": "chat_template_kwargs",
    "beam_width": "n",
    "include_stop": "include_stop_str_in_output",
}
"""Fields of the entrance that these APIs call otherwise."""


def status_of(error: TandemError) -> int:
    """Returns the HTTP status of an error."""
    if isinstance(error, NoRoute):
        return error.status
    return next(_STATUSES[cls] for cls in type(error).__mro__ if cls in _STATUSES)


def error_response(path: str, error: TandemError) -> web.Response:
    """Returns the answer to a request at `path` that failed before anything of its answer was sent."""
    body = anthropic_error(error) if path.startswith("/v1/messages") else openai_error(error)
    headers = {}
    if isinstance(error, errors.Overloaded) or error.reason is Reason.MODEL_CHANGED:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, errors.Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    status = status_of(error)
    return web.Response(status=status, body=msgspec.json.encode(body), headers=headers, content_type="application/json")


def openai_error(error: TandemError) -> dict[str, Any]:
    """Returns an error in OpenAI's shape; `code` is the reason of docs/protocol.md."""
    field, message = _named(error)
    code = None if isinstance(error, NoRoute) else error.reason.value
    return {"error": {"message": message, "type": _kind(error), "param": field or None, "code": code}}


def anthropic_error(error: TandemError) -> dict[str, Any]:
    """Returns an error in Anthropic's shape."""
    kind = "overloaded_error" if status_of(error) == 503 else _kind(error)
    message = re.sub("^stop:", "stop_sequences:", _named(error)[1])
    return {"type": "error", "error": {"type": "api_error" if kind == "server_error" else kind, "message": message}}


def _kind(error: TandemError) -> str:
    status = status_of(error)
    return _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")


def _named(error: TandemError) -> tuple[str, str]:
    """Returns field and message with the names that callers over HTTP know."""
    field = _OF_SAMPLING.sub("", error.field)
    field = _NAMES.get(field, field)
    message = error.message
    if error.field and message.startswith(f"{error.field}:"):
        message = field + message.removeprefix(error.field)
    return field, message
