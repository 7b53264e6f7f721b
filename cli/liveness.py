"""Whether a child of `tandem serve` should be left alone, asked of its `tandem.liveness` health.

A process that stands still answers nothing; one whose engine does says NOT_SERVING. One that drains refuses to be
called, as its last streams go on: it has time to end by itself.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Protocol

from shell.rpc.health import LIVENESS
from tandem.errors import DeadlineExceeded, Reason, TandemError, Unavailable

CHECK_S = 2.5
"""From one check to the next, and the longest that one takes: as long as peers wait before they let a process go."""
MAX_MISSES = 3
"""In a row; with the above, a frozen process is replaced after 7.5 to 10 s: requests wait for its successor."""
FROZEN_GRACE_S = 5.0
"""Given to a child that is to stop and has nothing to finish: it stands still, or was not ready yet."""


class Sign(enum.Enum):
    """What a check finds."""

    ALIVE = enum.auto()
    LEAVING = enum.auto()
    """The process has stopped listening."""
    NONE = enum.auto()


class HealthClient(Protocol):
    """The part of `tandem.client.AsyncClient` that is used here."""

    async def serving(self, service: str, *, timeout_s: float) -> bool:
        """What the process's health says of `service`."""


async def sign_of_life(client: HealthClient) -> Sign:
    """Makes a check, which takes `CHECK_S` at most."""
    try:
        return Sign.ALIVE if await client.serving(LIVENESS, timeout_s=CHECK_S) else Sign.NONE
    except DeadlineExceeded:
        return Sign.NONE
    except Unavailable as error:
        if error.reason is Reason.TLS_FAILED:  # files that do not fit, by a process that answers
            return Sign.ALIVE
        return Sign.LEAVING if "Connection refused" in error.message else Sign.NONE
    except TandemError:  # a refusal is an answer
        return Sign.ALIVE


async def until_frozen(client: HealthClient, leave_s: float, check_s: float = CHECK_S) -> None:
    """Checks until the process should be killed: it gives no sign for too long, or takes over `leave_s` to leave."""
    misses = 0
    while misses < MAX_MISSES:
        sign, _ = await asyncio.gather(sign_of_life(client), asyncio.sleep(check_s))
        if sign is Sign.LEAVING:
            await asyncio.sleep(leave_s)
            return
        misses = misses + 1 if sign is Sign.NONE else 0
