"""An answer as server-sent events, or as one JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from router.faces.openai.desk import REQUEST_ID
from shell.http.server import Call, write

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_PIECE_BYTES = 64 * 1024
_encode = msgspec.json.Encoder().encode


class EventStream:
    """Begins with its first event: an error before it still becomes a status."""

    def __init__(self, call: Call, request_id: str) -> None:
        self._request = call.request
        self._response = web.StreamResponse(headers={**_HEADERS, REQUEST_ID: request_id})

    @property
    def begun(self) -> bool:
        """Whether anything was sent."""
        return self._response.prepared

    async def send(self, data: Mapping[str, Any], event: str | None = None) -> None:
        """Sends an event. Raises ConnectionError once the caller is gone, or does not read."""
        name = b"" if event is None else b"event: %b\n" % event.encode()
        await write(self._request, self._response, b"%bdata: %b\n\n" % (name, _encode(data)))

    async def send_typed(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Sends events that are named by their `type`."""
        for event in events:
            await self.send(event, event["type"])

    async def end(self, *, done: bool = False) -> web.StreamResponse:
        """Ends the stream; `done` with OpenAI's word for it."""
        if done:
            await write(self._request, self._response, b"data: [DONE]\n\n")
        await write(self._request, self._response, None)
        return self._response


async def answer_whole(call: Call, request_id: str, body: Mapping[str, Any]) -> web.StreamResponse:
    """Answers with one document, and returns when it has left: until then the request is under way."""
    document = _encode(body)
    response = web.StreamResponse(headers={REQUEST_ID: request_id, "Content-Type": "application/json"})
    response.content_length = len(document)
    for start in range(0, len(document), _PIECE_BYTES):  # a slow reader is one that does not take the next piece
        await write(call.request, response, document[start : start + _PIECE_BYTES])
    await write(call.request, response, None)
    return response
