"""One child process of `tandem serve`, as its supervisor sees it: ready, ended, told to end."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from typing import IO

_LINE_LIMIT_BYTES = 1024 * 1024
_READY = "ready "


class Child:
    """One life of one child. stderr goes to `sink` line by line; stdout is read for the ready line only.

    By Popen rather than by the loop: it uses vfork, which a process with gRPC's threads survives
    unharmed; uvloop's fork runs gRPC's handlers, which complain on stderr.
    """

    def __init__(self, command: Sequence[str], sink: Callable[[str], None]) -> None:
        """Starts it, inside a running loop, in a session of its own: a terminal's ctrl-C is not for it."""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._sink = sink
        self.last_words = ""
        """The last line it wrote to stderr."""
        self._ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._readers = asyncio.gather(self._read_stdout(), self._read_stderr())

    async def ready(self) -> str | None:
        """The HOST:PORT that it printed; None if it ended without."""
        return await asyncio.shield(self._ready)

    async def wait(self) -> int:
        """Its exit code once it has ended and all it wrote was passed on; negative = a signal."""
        await asyncio.shield(self._readers)
        return await asyncio.to_thread(self._process.wait)  # at once: its pipes are closed

    def terminate(self) -> None:
        """Asks it to drain. A no-op once it has ended."""
        self._process.terminate()

    def kill(self) -> None:
        """Ends it at once. A no-op once it has ended."""
        self._process.kill()

    async def _read_stdout(self) -> None:
        async for line in _lines(self._process.stdout):
            if line.startswith(_READY) and not self._ready.done():
                self._ready.set_result(line.removeprefix(_READY).strip())
        if not self._ready.done():
            self._ready.set_result(None)

    async def _read_stderr(self) -> None:
        async for line in _lines(self._process.stderr):
            self.last_words = line.strip() or self.last_words
            self._sink(line)


async def _lines(pipe: IO[bytes] | None) -> AsyncIterator[str]:
    """Lines without their ends, until the pipe ends; one longer than the limit is dropped."""
    assert pipe is not None
    stream = asyncio.StreamReader(limit=_LINE_LIMIT_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    try:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the limit
                continue
            if not line:
                return
            yield line.decode(errors="replace").rstrip("\n")
    finally:
        transport.close()
