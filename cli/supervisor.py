"""Keeps one child of `tandem serve` alive, from its first start to its ordered end.

    starting → ready → exited → (delay) → starting …     `run`, until the policy says otherwise
    any state → stopping → ended                         `stop`: SIGTERM, grace, SIGKILL

Knows neither what the child is nor how it is started; whether to restart is `RestartPolicy`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cli.child import Child
from cli.restart import RestartPolicy
from tandem.errors import ConfigError, Unavailable
from tandem.rpc.process import EXIT_BAD_CONFIG, EXIT_OK
from tandem.telemetry.logging import get_logger

_log = get_logger(__name__)


class Supervisor:
    """One child's keeper. `run` is a task of the caller's; the other calls come from other tasks."""

    def __init__(self, name: str, start: Callable[[], Child], policy: RestartPolicy, stop_grace_s: float) -> None:
        self.name = name
        self._stop_grace_s = stop_grace_s
        self._start = start
        self._policy = policy
        self._child: Child | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def address(self) -> str:
        """HOST:PORT of the child's first life, once it is ready."""
        return await asyncio.shield(self._address)

    async def run(self) -> None:
        """Returns when the child was stopped or left on request.

        Raises ConfigError with the child's last words if it refuses its options, Unavailable if it
        never gets ready. Cancelled, it kills the child.
        """
        try:
            while not self._stopping.is_set():
                returncode = await self._one_life()
                if self._stopping.is_set() or not await self._goes_on(returncode):
                    return
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Asks the child to drain, kills it after its grace, returns when it has ended. Idempotent."""
        self._stopping.set()
        if self._child is not None:
            self._child.terminate()
        try:
            await asyncio.wait_for(self._ended.wait(), self._stop_grace_s)
        except TimeoutError:
            _log.warning("killing a child that does not end", child=self.name, grace_s=self._stop_grace_s)
            self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        """Ends the child at once; it is not started again."""
        self._stopping.set()
        if self._child is not None:
            self._child.kill()

    async def _one_life(self) -> int:
        child = self._child = self._start()
        try:
            address = await child.ready()
            if address is not None:
                self._policy.became_ready()
                if not self._address.done():
                    self._address.set_result(address)
                _log.info("child ready", child=self.name, address=address)
            return await child.wait()
        except asyncio.CancelledError:
            child.kill()
            await child.wait()
            raise

    async def _goes_on(self, returncode: int) -> bool:
        """Waits for the restart's time; False if the child left on request, or a stop came first."""
        delay_s = self._policy.restart_delay_s(returncode)
        if delay_s is None:
            if returncode != EXIT_OK:
                raise self._failure(returncode)
            _log.info("child left", child=self.name)
            return False
        _log.warning("child died", child=self.name, code=returncode, restart_in_s=delay_s)
        try:
            await asyncio.wait_for(self._stopping.wait(), delay_s)
        except TimeoutError:
            return True
        return False

    def _failure(self, returncode: int) -> ConfigError | Unavailable:
        words = self._child.last_words.removeprefix("tandem: ") if self._child else ""
        if returncode == EXIT_BAD_CONFIG:
            return ConfigError(self.name, words)
        return Unavailable(f"{self.name} exits with code {returncode} before it is ready: {words}")
