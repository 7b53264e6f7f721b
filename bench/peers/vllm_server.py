"""vLLM's own HTTP server as a peer: started, waited for, and asked for streams of server-sent events.

The client is as thin as asyncio allows, since it shares the cores with the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.peers.job import peer_dtype
from bench.peers.process import OPEN_TIMEOUT_S, PeerError, PeerProcess, vllm_environment
from bench.support.ports import free_ports
from bench.support.streams import REQUEST_TIMEOUT_S, Arrivals, OnFirst, Prompt, Stream

_HOST = "127.0.0.1"
_MODEL = "peer"
_POLL_S = 0.25
_DATA = b"data: "
_DONE = b"[DONE]"


class VllmServer:
    """The server's process and its address."""

    def __init__(self, model: Path, cores: Sequence[int], vllm_python: Path, context_tokens: int) -> None:
        (self.port,) = free_ports(1)
        options = (
            *("--model", str(model), "--served-model-name", _MODEL),
            *("--dtype", peer_dtype(torch.backends.cpu.get_cpu_capability())),
            *("--host", _HOST, "--port", str(self.port), "--max-model-len", str(context_tokens)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
        )
        command = (str(vllm_python), "-P", "-m", "vllm.entrypoints.openai.api_server", *options)
        self.process = PeerProcess("vllm server", command, vllm_environment(vllm_python, cores))

    async def wait_ready(self) -> None:
        """Raises PeerError if it dies or takes too long."""
        deadline_s = time.monotonic() + OPEN_TIMEOUT_S
        while not await self._is_healthy():
            if not self.process.is_running:
                raise self.process.failure("ended")
            if time.monotonic() > deadline_s:
                raise self.process.failure(f"was not ready in {OPEN_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_POLL_S)

    async def _is_healthy(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection(_HOST, self.port)
        except OSError:
            return False
        try:
            writer.write(b"GET /health HTTP/1.1\r\nHost: peer\r\nConnection: close\r\n\r\n")
            return b" 200 " in await asyncio.wait_for(reader.readline(), 5.0)
        except (OSError, TimeoutError):
            return False
        finally:
            writer.close()


class VllmStreams:
    """OpenAI completions with token ids as prompts; one connection a request."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server

    async def generate(self, prompt: Prompt, max_tokens: int, on_first: OnFirst | None = None) -> Stream:
        """See StreamClient. Raises PeerError."""
        body = {
            "model": _MODEL,
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
            raise self._server.process.failure(f"broke a stream off ({error!r})") from error
        found = usage.get("prompt_tokens_details") or {}  # left out if nothing was found
        return arrivals.stream(max_tokens, found.get("cached_tokens") or 0)

    async def _post(self, path: str, payload: bytes) -> AsyncIterator[bytes]:
        """Yields the data of each event."""
        reader, writer = await asyncio.open_connection(_HOST, self._server.port)
        try:
            head = f"POST {path} HTTP/1.1\r\nHost: peer\r\nContent-Type: application/json\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
            status = await reader.readline()
            if b" 200 " not in status:
                raise PeerError(f"vllm server answered {status!r}")
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
