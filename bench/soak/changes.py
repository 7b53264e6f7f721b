"""What an operator changes in a cluster under a soak: new weights, rolled out worker by worker, and passing guests.

A roll-out replaces the weights in the model's folder, then stops each worker that has the old ones; `tandem serve`
starts it again with the new ones. A guest is a worker of another layout that registers beside the others for a while.
Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from bench.soak.faults import ROUTER
from bench.soak.model import SoakModel
from bench.support.cluster import eventually
from bench.support.processes import children, started_s

NEW_WEIGHTS, GUEST = "new weights", "guest"
GUESTS = (
    ("worker", "--kv-dtype", "int8"),
    ("worker", "--block-size", "32"),
    ("decode", "--kv-dtype", "int8"),
)
"""Command and options, each of another fingerprint than the cluster's workers."""
_PAUSE_S = (0.5, 4.0)
"""Between two changes."""
_BETWEEN_WORKERS_S = (0.2, 3.0)
_SHARE_KILLED = 0.5
"""Of workers that are restarted: what they stream goes on elsewhere, by other weights if nobody takes care."""
_GONE_WITHIN_S = 30.0
_READY_WITHIN_S = 60.0
_STAY_S = (2.0, 8.0)
_LEAVE_WITHIN_S = 30.0
_LAST_LINES = 8
"""Of the log of a guest that failed."""


class Changes:
    """Draws and does, beside whatever faults. `counts` says how often; `violations` names guests that did not end."""

    def __init__(
        self,
        serve_pid: int,
        target: str,
        model: SoakModel,
        guest_options: Sequence[str],
        rng: Random,
        say: Callable[[str], None],
    ) -> None:
        """`target`: the router's address; `guest_options`: what guests have in common with the cluster's workers."""
        self._serve_pid = serve_pid
        self._target = target
        self._model = model
        self._guest_options = guest_options
        self._rng = rng
        self._say = say
        self._swapped_s = -math.inf
        """When the weights were replaced last: older workers may have read others."""
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []

    async def run(self) -> None:
        """Until it is cancelled; a guest leaves then."""
        while True:
            await self.roll_out()
            await asyncio.sleep(self._rng.uniform(*_PAUSE_S))
            await self.guest()
            await asyncio.sleep(self._rng.uniform(*_PAUSE_S))

    async def roll_out(self) -> None:
        """Replaces the weights, then restarts the workers one by one, in any order, while the others serve."""
        names = sorted(self._workers())
        self._rng.shuffle(names)
        self._model.swap()
        self._swapped_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._count(NEW_WEIGHTS, self._model.weights)
        for name in names:
            await self._renew(name)
            await asyncio.sleep(self._rng.uniform(*_BETWEEN_WORKERS_S))

    async def finish(self) -> None:
        """Ends a roll-out that was cancelled: returns once no worker has other weights than the folder."""
        while outdated := self._outdated():
            await asyncio.gather(*map(self._renew, outdated))

    async def guest(self) -> None:
        """Starts a worker of another layout, and stops it some seconds after it is ready."""
        command, *options = self._rng.choice(GUESTS)
        name = f"guest-{self.counts[GUEST]}"
        log = self._model.folder.parent / f"{name}.log"
        process = self._start(log, command, "--worker-id", name, *options)
        self._count(GUEST, f"{name}, {command} {' '.join(options)}")
        assert process.stdout is not None
        is_ready = False
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_READY_WITHIN_S):
                    is_ready = (await asyncio.to_thread(process.stdout.readline)).startswith(b"ready ")
            await asyncio.sleep(self._rng.uniform(*_STAY_S) if is_ready else 0.0)
        finally:
            await self._see_off(name, process, log, is_ready=is_ready)
        if not is_ready:
            self.violations.append(f"not whole: {name} was not ready within {_READY_WITHIN_S:g} s: {_last_words(log)}")

    def _start(self, log: Path, command: str, *options: str) -> subprocess.Popen[bytes]:
        """Not by the event loop's own way, which forks: gRPC's threads of this process do not bear that."""
        given = ("--model", str(self._model.folder), "--router", self._target, *self._guest_options, *options)
        place = ("--listen", "127.0.0.1:0", "--admin-listen", "none")
        with log.open("wb") as words:
            arguments = (sys.executable, "-m", "cli.main", command, *given, *place)
            return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=words)

    async def _see_off(self, name: str, process: subprocess.Popen[bytes], log: Path, *, is_ready: bool) -> None:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        try:
            code = await asyncio.to_thread(process.wait, _LEAVE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.violations.append(f"hang: {name} has not ended {_LEAVE_WITHIN_S:g} s after SIGTERM")
            process.kill()
            code = await asyncio.to_thread(process.wait)
        finally:  # cancelled once more, too
            process.kill()
            process.stdout.close()
        self._say(f"{name} left with code {code}")
        if code not in (0, -signal.SIGKILL) and is_ready:
            self.violations.append(f"error: {name} left with code {code}: {_last_words(log)}")

    def _workers(self) -> dict[str, int]:
        return {name: pid for name, pid in children(self._serve_pid).items() if not name.startswith(ROUTER)}

    def _outdated(self) -> dict[str, int]:
        """Workers that began before the weights were replaced."""
        return {name: pid for name, pid in self._workers().items() if (started_s(pid) or math.inf) <= self._swapped_s}

    async def _renew(self, name: str) -> None:
        """Stops the worker, and waits until it is gone; one that a fault has ended has the new weights already."""
        pid = self._outdated().get(name)
        if pid is None:
            return
        number = signal.SIGKILL if self._rng.random() < _SHARE_KILLED else signal.SIGTERM
        self._say(f"restart: {name} by {number.name}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        # A frozen one hears of it later.
        await asyncio.to_thread(eventually, lambda: self._outdated().get(name) != pid, _GONE_WITHIN_S)

    def _count(self, what: str, whom: str) -> None:
        self.counts[what] += 1
        self._say(f"{what}: {whom}")


def _last_words(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
