"""An answer as server-sent events, or as one JSON document."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from router.faces.openai.desk import REQUEST_ID
from shell.http.server import Call, write
from tandem.errors import TandemError

Event = Mapping[str, Any]

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_PIECE_BYTES = 64 * 1024
_encode = msgspec.json.Encoder().encode


async def answer_stream(
    call: Call,
    request_id: str,
    events: AsyncGenerator[Event, None],
    failed: Callable[[TandemError], Iterable[Event]],
    *,
    named: bool,
) -> web.StreamResponse:
    """Answers with `events`, and with those of `failed` in the place of the rest if an error comes among them.

    `named`: each event bears its `type` as its name; else `[DONE]` ends the stream. Raises the error that comes before
    the first event, which still becomes a status, and ConnectionError once the caller is gone, or does not read.
    """
    response = web.StreamResponse(headers={**_HEADERS, REQUEST_ID: request_id})

    async def send(event: Event) -> None:
        name = b"event: %b\n" % event["type"].encode() if named else b""
        await write(call.request, response, b"%bdata: %b\n\n" % (name, _encode(event)))

    async with aclosing(events):
        try:
            async for event in events:
                await send(event)
            if not named:
                await write(call.request, response, b"data: [DONE]\n\n")
        except TandemError as error:
            if not response.prepared:
                raise
            for event in failed(error):
                await send(event)
    await write(call.request, response, None)
    return response


async def answer_whole(call: Call, request_id: str, body: Mapping[str, Any]) -> web.StreamResponse:
    """Answers with one document, and returns when it has left: until then the request is under way."""
    document = _encode(body)
    response = web.StreamResponse(headers={REQUEST_ID: request_id, "Content-Type": "application/json"})
    response.content_length = len(document)
    for start in range(0, len(document), _PIECE_BYTES):  # a slow reader is one that does not take the next piece
        await write(call.request, response, document[start : start + _PIECE_BYTES])
    await write(call.request, response, None)
    return response
