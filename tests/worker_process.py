"""One worker as its own process, for tests that drive it as a router would."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

DEADLINE_S = 60.0


@asynccontextmanager
async def worker_process(module: str, model: Path, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m MODULE` with a small pool, on one thread; killed at the end, unless it has ended."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--model", str(model), "--threads", "1", "--kv-blocks", "64", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def address_of(child: asyncio.subprocess.Process) -> str:
    """Where it serves, once it does."""
    assert child.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        word, address = (await child.stdout.readline()).decode().split()
    assert word == "ready"
    return address
