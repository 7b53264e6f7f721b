"""Client of a server that speaks OpenAI's API, as thin as asyncio allows, since it shares the cores with the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from bench.support.streams import REQUEST_TIMEOUT_S, Arrivals, OnFirst, Prompt, Stream

_HOST = "127.0.0.1"
_DATA = b"data: "
_DONE = b"[DONE]"


class BrokenStream(Exception):
    """The server refused a request or broke its answer off."""


class HttpStreams:
    """OpenAI completions with token ids as prompts; one connection a request."""

    def __init__(self, port: int, model: str) -> None:
        """`port`: of a server on this machine."""
        self._port = port
        self._model = model

    async def generate(self, prompt: Prompt, max_tokens: int, on_first: OnFirst | None = None) -> Stream:
        """See StreamClient. Raises BrokenStream."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        arrivals = Arrivals(on_first)
        usage: dict[str, Any] = {}
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                async for event in self._post("/v1/completions", json.dumps(body).encode()):
                    document = json.loads(event)
                    for choice in document["choices"]:  # none in the last event
                        arrivals.add(choice["token_ids"] or ())
                    usage = document.get("usage") or usage
        except (OSError, EOFError, TimeoutError) as error:
            raise BrokenStream(repr(error)) from error
        found = usage.get("prompt_tokens_details") or {}  # left out if nothing was found
        return arrivals.stream(max_tokens, found.get("cached_tokens") or 0)

    async def _post(self, path: str, payload: bytes) -> AsyncIterator[bytes]:
        """Yields the data of each event."""
        reader, writer = await asyncio.open_connection(_HOST, self._port)
        try:
            head = f"POST {path} HTTP/1.1\r\nHost: peer\r\nContent-Type: application/json\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
            status = await reader.readline()
            if b" 200 " not in status:
                raise BrokenStream(f"answered {status!r}")
            await reader.readuntil(b"\r\n\r\n")
            async for event in events(chunks(reader)):
                yield event
        finally:
            writer.close()


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The parts of a body in HTTP's chunked coding (RFC 9112 §7.1)."""
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event up to `[DONE]`, however the parts are cut."""
    buffer = b""
    async for part in parts:
        *whole, buffer = (buffer + part).split(b"\n\n")
        for event in whole:
            data = event.removeprefix(_DATA)
            if data == _DONE:
                return
            yield data
