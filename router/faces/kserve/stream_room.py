"""How much one stream may have under way: the number of its requests, and their bytes.

What finds no room stays unread, so that the client's flow control holds it back.
"""

from __future__ import annotations

import asyncio

MAX_REQUESTS = 1024
MAX_BYTES = 16 * 1024 * 1024


class StreamRoom:
    """Single-threaded. Whoever enters, leaves with the same number of bytes."""

    def __init__(self) -> None:
        self._num_requests = 0
        self._num_bytes = 0
        self._left = asyncio.Event()

    async def enter(self, num_bytes: int) -> None:
        """Returns once there is room. A request alone has it, however large it is."""
        while self._num_requests >= MAX_REQUESTS or (self._num_requests and self._num_bytes + num_bytes > MAX_BYTES):
            await self._next_leave()
        self._num_requests += 1
        self._num_bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        """One request is answered."""
        self._num_requests -= 1
        self._num_bytes -= num_bytes
        self._left.set()

    async def empty(self) -> None:
        """Returns once nothing is under way."""
        while self._num_requests:
            await self._next_leave()

    async def _next_leave(self) -> None:
        self._left.clear()
        await self._left.wait()
