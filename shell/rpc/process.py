"""A process's outermost frame: standard streams, options, event loop, signals, exit code.

The first SIGTERM or SIGINT asks to stop, the second ends the process at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import uvloop

from shell.command_line import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK, CommandLine
from shell.config import add_arguments, load
from shell.rpc.open_files import check_open_files
from shell.standard_streams import hold_standard_streams
from shell.telemetry.logging import get_logger
from shell.telemetry.stderr_lines import flush_lines, write_line
from tandem.errors import CheckpointError, ConfigError, TandemError

_log = get_logger(__name__)

T = TypeVar("T")

REPORT = "tandem: "
"""Begins the line that says why a process ends."""


class StopSignal:
    """Tells a process's main function to stop."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self._on_abort: list[Callable[[], None]] = []

    def on_abort(self, callback: Callable[[], None]) -> None:
        """Called when the process ends at once; for what would outlive it, such as children."""
        self._on_abort.append(callback)

    async def wait(self) -> None:
        """Returns once a stop was asked for."""
        await self.requested.wait()

    async def unless_stopped(self, load: Callable[[], T]) -> T:
        """What `load` returns, called in a thread. A stop ends the process at once, with code 0.

        For what takes minutes, cannot be told to end, and holds nothing that outlives the process.
        """
        loading = asyncio.ensure_future(asyncio.to_thread(load))
        stopping = asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                flush_lines()
                os._exit(EXIT_OK)
            return loading.result()
        finally:
            stopping.cancel()

    def deliver(self, signum: signal.Signals) -> None:
        """Takes a signal."""
        if not self.requested.is_set():
            _log.info("stopping", signal=signum.name)
            self.requested.set()
            return
        _log.warning("ending at once", signal=signum.name)
        for callback in self._on_abort:
            callback()
        flush_lines()
        os._exit(128 + signum)


def run_module(prog: str, description: str, config_class: type[T], run: Callable[[T], int]) -> int:
    """`python -m router` and its like: reads argv and environment into `config_class`, then runs."""
    hold_standard_streams()
    parser = CommandLine(prog=prog, description=description)
    add_arguments(parser, config_class)
    try:
        return run(load(config_class, parser.parse_args()))
    except TandemError as error:
        return _report(error)


def run_process(main: Callable[[StopSignal], Awaitable[None]]) -> int:
    """Runs `main` on uvloop until it returns; returns the exit code.

    ConfigError and CheckpointError are for the operator: one line on stderr, code 2.
    """
    try:
        check_open_files()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_with_signals(main))
    except TandemError as error:
        return _report(error)
    except ExceptionGroup as group:  # from a TaskGroup: the first of ours says what is wrong
        ours: BaseException | None = group.subgroup(TandemError)
        while isinstance(ours, BaseExceptionGroup):
            ours = ours.exceptions[0]
        if not isinstance(ours, TandemError):
            raise
        return _report(ours)
    finally:
        flush_lines()  # before the traceback of a bug
    return EXIT_OK


def _report(error: TandemError) -> int:
    write_line(f"{REPORT}{error.message}")
    flush_lines()
    return EXIT_BAD_CONFIG if isinstance(error, ConfigError | CheckpointError) else EXIT_FAILED


async def _with_signals(main: Callable[[StopSignal], Awaitable[None]]) -> None:
    stop = StopSignal()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.deliver, signum)
    await main(stop)
