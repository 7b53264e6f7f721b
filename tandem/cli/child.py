"""One child process of `tandem serve`, as its supervisor sees it: ready, ended, told to end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

_LINE_LIMIT_BYTES = 1024 * 1024
_READY = "ready "


class Child(Protocol):
    """One life of one child."""

    @property
    def last_words(self) -> str:
        """The last line it wrote to stderr."""
        ...

    async def ready(self) -> str | None:
        """The HOST:PORT that it printed; None if it ended without."""
        ...

    async def wait(self) -> int:
        """Its exit code once it has ended and all it wrote was passed on; negative = a signal."""
        ...

    def terminate(self) -> None:
        """Asks it to drain. A no-op once it has ended."""
        ...

    def kill(self) -> None:
        """Ends it at once. A no-op once it has ended."""
        ...


class ProcessChild:
    """A real one. stderr goes to `sink` line by line; stdout is read for the ready line only."""

    def __init__(self, process: asyncio.subprocess.Process, sink: Callable[[str], None]) -> None:
        self._process = process
        self._sink = sink
        self._last_words = ""
        self._ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._readers = asyncio.gather(self._read_stdout(), self._read_stderr())

    @classmethod
    async def start(cls, command: Sequence[str], sink: Callable[[str], None]) -> ProcessChild:
        """Starts it in a session of its own, so that a terminal's ctrl-C reaches the supervisor only."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_LINE_LIMIT_BYTES,
        )
        return cls(process, sink)

    @property
    def last_words(self) -> str:
        """The last line it wrote to stderr."""
        return self._last_words

    async def ready(self) -> str | None:
        """The HOST:PORT that it printed; None if it ended without."""
        return await asyncio.shield(self._ready)

    async def wait(self) -> int:
        """Its exit code once it has ended and all it wrote was passed on; negative = a signal."""
        await asyncio.shield(self._readers)
        return await self._process.wait()

    def terminate(self) -> None:
        """Asks it to drain. A no-op once it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Ends it at once. A no-op once it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _read_stdout(self) -> None:
        assert self._process.stdout is not None
        while line := await _next_line(self._process.stdout):
            if line.startswith(_READY) and not self._ready.done():
                self._ready.set_result(line.removeprefix(_READY).strip())
        if not self._ready.done():
            self._ready.set_result(None)

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while line := await _next_line(self._process.stderr):
            self._last_words = line.strip() or self._last_words
            self._sink(line.rstrip("\n"))


async def _next_line(stream: asyncio.StreamReader) -> str:
    """The next line with its end; "" at the end of the stream."""
    while True:
        try:
            return (await stream.readline()).decode(errors="replace")
        except ValueError:  # longer than the limit: readline has dropped it
            continue
