"""Keeps one child of `tandem serve` alive, from its first start to its ordered end.

    starting → ready → exited → (delay) → starting …     `run`, until the policy says otherwise
                 └─ frozen: SIGKILL ─┘
    any state → stopping → ended                         `stop`: SIGTERM, grace, SIGKILL

`Supervisor` knows neither what the child is nor how it is started; whether to restart is `RestartPolicy`'s, whether
it is frozen `liveness`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import IO, Protocol, TypeAlias

from cli.liveness import CHECK_S, FROZEN_GRACE_S, HealthClient, Sign, sign_of_life, until_frozen
from shell.clock import Clock
from shell.command_line import EXIT_BAD_CONFIG
from shell.rpc.process import REPORT
from shell.telemetry.logging import get_logger
from tandem.errors import ConfigError, Unavailable

_log = get_logger(__name__)

START_TIMEOUT_S = 600.0
"""A large checkpoint on a slow disk takes minutes."""
_LINE_LIMIT_BYTES = 1024 * 1024
_LAST_LINES_S = 1.0
"""How long the output of a child that has ended is read on: a process that the child started may hold its pipes."""
_READY = "ready "
_NOT_STARTED = 1
"""The code of a child that could not even be started."""
Connect: TypeAlias = Callable[[str], AbstractAsyncContextManager[HealthClient]]


class Process(Protocol):
    """What `subprocess.Popen` does for a `Child`."""

    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def wait(self) -> int:
        """Returns the exit code once the process has ended; negative = a signal."""

    def terminate(self) -> None:
        """SIGTERM."""

    def kill(self) -> None:
        """SIGKILL."""


def open_process(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a child, in a process group of its own: a terminal's ctrl-C is not for it.

    It stays in this session: a kernel that schedules by session then weighs the threads of all children alike.

    By Popen rather than by the loop: it uses vfork, which a process with gRPC's threads survives
    unharmed; uvloop's fork runs gRPC's handlers, which complain on stderr.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        process_group=0,
    )


class Child:
    """One life of one child. stdout is read for the ready line only.

    stderr goes to `sink` line by line, except for the line that says why the child ends: `last_words` has that.
    """

    def __init__(self, process: Process, sink: Callable[[str], None]) -> None:
        """Takes over what was started, inside a running loop."""
        self._process = process
        self._sink = sink
        self.last_words = ""
        """Last line that the child wrote to stderr."""
        self._ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._end = asyncio.ensure_future(self._until_end())

    async def ready(self) -> str | None:
        """Returns the HOST:PORT that the child printed; None if the child ended without."""
        return await asyncio.shield(self._ready)

    async def wait(self) -> int:
        """Its exit code once it has ended and all it wrote was passed on; negative = a signal."""
        return await asyncio.shield(self._end)

    def terminate(self) -> None:
        """Asks the child to drain. A no-op once the child has ended."""
        self._process.terminate()

    def kill(self) -> None:
        """Kills the child. A no-op once the child has ended."""
        self._process.kill()

    async def _until_end(self) -> int:
        readers = asyncio.gather(self._read_stdout(), self._read_stderr())
        code = await _exit_code(self._process)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(readers, _LAST_LINES_S)
        if not self._ready.done():
            self._ready.set_result(None)
        return code

    async def _read_stdout(self) -> None:
        async for line in _lines(self._process.stdout):
            if line.startswith(_READY) and not self._ready.done():
                self._ready.set_result(line.removeprefix(_READY).strip())

    async def _read_stderr(self) -> None:
        async for line in _lines(self._process.stderr):
            self.last_words = line.strip() or self.last_words
            if not line.startswith(REPORT):
                self._sink(line)


@dataclass(slots=True)
class RestartPolicy:
    """When a child that ended is started again, and when there is no point.

    never ready before   exit 2: its options or its model are wrong, the whole server gives up;
                         otherwise after `max_failed_starts` in a row
    ready before         always again, whatever its code: at once, if it had been ready for `healthy_after_s` or had
                         not ended before; else after a delay that doubles up to a cap
    """

    clock: Clock
    first_delay_s: float = 1.0
    max_delay_s: float = 30.0
    healthy_after_s: float = 30.0
    max_failed_starts: int = 3
    _next_delay_s: float = field(init=False)
    _failed_starts: int = field(default=0, init=False)
    _was_ever_ready: bool = field(default=False, init=False)
    _ready_at_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._next_delay_s = self.first_delay_s

    def became_ready(self) -> None:
        """The child printed its address."""
        if not self._was_ever_ready:
            self._was_ever_ready, self._next_delay_s = True, 0.0
        self._ready_at_s = self.clock.now_s()

    def restart_delay_s(self, returncode: int) -> float | None:
        """How long to wait before the next start of a child that ended by itself, None = never.

        Negative codes are signals.
        """
        ready_at_s, self._ready_at_s = self._ready_at_s, None
        if not self._was_ever_ready:
            self._failed_starts += 1
            if returncode == EXIT_BAD_CONFIG or self._failed_starts >= self.max_failed_starts:
                return None
        if ready_at_s is not None and self.clock.now_s() - ready_at_s >= self.healthy_after_s:
            self._next_delay_s = 0.0
        delay_s = self._next_delay_s
        self._next_delay_s = min(self.max_delay_s, max(self.first_delay_s, 2 * delay_s))
        return delay_s


class Supervisor:
    """One child's keeper. `run` is a task of the caller's; the other calls come from other tasks."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Child],
        connect: Connect,
        policy: RestartPolicy,
        stop_grace_s: float,
        *,
        check_s: float = CHECK_S,
        frozen_grace_s: float = FROZEN_GRACE_S,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`connect` makes what asks a child at HOST:PORT for its health, from its being ready to its end."""
        self.name = name
        self._stop_grace_s = stop_grace_s
        self._frozen_grace_s = frozen_grace_s
        self._start_timeout_s = start_timeout_s
        self._check_s = check_s
        self._start = start
        self._connect = connect
        self._policy = policy
        self._child: Child | None = None
        self._last_words = ""
        """Last line of the child that ended last, or why none was started."""
        self._client: HealthClient | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def address(self) -> str:
        """HOST:PORT of the child's first life, once it is ready.

        Raises CancelledError if the child was stopped before: who waits for it has nothing left to do.
        """
        return await asyncio.shield(self._address)

    async def run(self) -> None:
        """Returns when the child was stopped.

        Raises ConfigError with the child's last words if it refuses its options, Unavailable if it
        never gets ready. Cancelled, it kills the child.
        """
        try:
            while not self._stopping.is_set():
                returncode = await self._one_life()
                if not await self._goes_on(returncode):
                    return
        finally:
            self._address.cancel()  # without effect on one that is known
            self._ended.set()

    async def stop(self) -> None:
        """Asks the child to drain, kills it after its grace, returns when it has ended. Idempotent.

        The grace is for what the child has begun: one that gives no sign of life gets little.
        """
        self._stopping.set()
        drains = self._client is not None and await sign_of_life(self._client) is not Sign.NONE
        grace_s = self._stop_grace_s if drains else self._frozen_grace_s
        if self._child is not None:
            self._child.terminate()
        try:
            await asyncio.wait_for(self._ended.wait(), grace_s)
        except TimeoutError:
            _log.warning("killing a child that does not end", child=self.name, grace_s=grace_s)
            self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        """Kills the child, which is not started again."""
        self._stopping.set()
        if self._child is not None:
            self._child.kill()

    async def _one_life(self) -> int:
        try:
            child = self._child = self._start()
        except OSError as error:  # no memory, process or descriptor left; the other children go on
            _log.warning("cannot start a child", child=self.name, error=str(error))
            self._child, self._last_words = None, str(error)
            return _NOT_STARTED
        try:
            address = await self._ready_address(child)
            if address is None:
                return await child.wait()
            self._policy.became_ready()
            if not self._address.done():
                self._address.set_result(address)
            _log.info("child ready", child=self.name, address=address)
            return await self._serving_life(child, address)
        except asyncio.CancelledError:
            child.kill()
            await child.wait()
            raise
        finally:
            self._last_words = child.last_words

    async def _ready_address(self, child: Child) -> str | None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                return await child.ready()
        except TimeoutError:
            _log.warning("killing a child that does not get ready", child=self.name, after_s=self._start_timeout_s)
            child.kill()
            return None

    async def _serving_life(self, child: Child, address: str) -> int:
        async with self._connect(address) as client:
            self._client = client
            watch = asyncio.create_task(self._kill_if_frozen(child, client), name=f"watch-{self.name}")
            try:
                return await child.wait()
            finally:
                self._client = None
                watch.cancel()
                await asyncio.wait({watch}, timeout=self._check_s)

    async def _kill_if_frozen(self, child: Child, client: HealthClient) -> None:
        await until_frozen(client, self._stop_grace_s, self._check_s)
        _log.warning("killing a child that gives no sign of life", child=self.name)
        child.kill()

    async def _goes_on(self, returncode: int) -> bool:
        """Waits for the restart's time; False if a stop came first."""
        words = self._last_words.removeprefix(REPORT)
        if self._stopping.is_set():
            if returncode > 0:
                _log.warning("child ended", child=self.name, code=returncode, last_words=words)
            return False
        delay_s = self._policy.restart_delay_s(returncode)
        if delay_s is None:
            if returncode == EXIT_BAD_CONFIG:
                raise ConfigError(self.name, words)
            raise Unavailable(f"{self.name} exits with code {returncode} before it is ready: {words}")
        _log.warning("child ended", child=self.name, code=returncode, restart_in_s=delay_s, last_words=words)
        try:
            await asyncio.wait_for(self._stopping.wait(), delay_s)
        except TimeoutError:
            return True
        return False


def _exit_code(process: Process) -> asyncio.Future[int]:
    """Comes from a thread of the child's own: the loop's executor has fewer threads than there may be children."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def tell(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def wait() -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended before the child
            loop.call_soon_threadsafe(tell, code)

    threading.Thread(target=wait, name="child's end", daemon=True).start()
    return ended


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
