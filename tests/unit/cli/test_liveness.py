from __future__ import annotations

import asyncio

import pytest

from cli.liveness import Sign, sign_of_life, until_frozen
from shell.rpc.server import RpcServer
from tandem.client import AsyncClient
from tandem.errors import DeadlineExceeded, Overloaded, Reason, TandemError, Unavailable

TIMEOUT_S = 20.0


class Answers:
    """A health that gives these answers in turn, and then the last for ever."""

    def __init__(self, *answers: bool | TandemError) -> None:
        self._answers = list(answers)
        self.num_asked = 0

    async def serving(self, service: str, *, timeout_s: float) -> bool:
        self.num_asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, TandemError):
            raise answer
        return answer


SILENT = DeadlineExceeded("no answer")


@pytest.mark.parametrize(
    ("answer", "sign"),
    [
        (True, Sign.ALIVE),
        (False, Sign.NONE),
        (SILENT, Sign.NONE),
        (Unavailable("UNAVAILABLE: ping timeout"), Sign.NONE),
        (Unavailable("UNAVAILABLE: handshake failed", Reason.TLS_FAILED), Sign.ALIVE),
        (Overloaded("too many calls"), Sign.ALIVE),
    ],
)
async def test_only_silence_and_an_engine_that_stands_still_are_no_sign(answer: bool | TandemError, sign: Sign) -> None:
    assert await sign_of_life(Answers(answer)) is sign


async def test_a_process_is_frozen_after_three_misses_in_a_row() -> None:
    health = Answers(SILENT, False, True, SILENT, SILENT, True, SILENT)
    await asyncio.wait_for(until_frozen(health, leave_s=TIMEOUT_S, check_s=0), TIMEOUT_S)
    assert health.num_asked == 9


async def test_a_server_that_drains_is_leaving_and_not_frozen() -> None:
    server = RpcServer("127.0.0.1:0", [], announce_s=0)
    port = await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        assert await sign_of_life(client) is Sign.ALIVE
        await server.drain(grace_s=0)
        assert await sign_of_life(client) is Sign.LEAVING


async def test_who_takes_too_long_to_leave_is_frozen() -> None:
    refusal = Unavailable("UNAVAILABLE: Failed to connect to remote host: Connection refused")
    health = Answers(True, refusal)
    await asyncio.wait_for(until_frozen(health, leave_s=0, check_s=0), TIMEOUT_S)
    assert health.num_asked == 2
