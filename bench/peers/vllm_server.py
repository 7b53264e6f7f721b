"""vLLM's own HTTP server as a peer: started, waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.peers.job import peer_dtype
from bench.peers.process import OPEN_TIMEOUT_S, PeerProcess, vllm_environment
from bench.support.ports import free_ports

_HOST = "127.0.0.1"
MODEL = "peer"
_POLL_S = 0.25
_DATA = b"data: "
_DONE = b"[DONE]"


class VllmServer:
    """The server's process and its address."""

    def __init__(self, model: Path, cores: Sequence[int], vllm_python: Path, context_tokens: int) -> None:
        (self.port,) = free_ports(1)
        options = (
            *("--model", str(model), "--served-model-name", MODEL),
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
