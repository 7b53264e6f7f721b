import asyncio
import errno
from collections.abc import AsyncIterator
from typing import Self

import pytest

from cli.supervisor import RestartPolicy, Supervisor
from shell.rpc.health import LIVENESS
from tandem.errors import ConfigError, DeadlineExceeded, Unavailable
from tests.manual_clock import ManualClock

DEADLINE_S = 20.0


class FakeChild:
    """A child that does what the test tells it."""

    def __init__(self) -> None:
        self.last_words = "tandem: --kv-blocks: too many"
        self.signals: list[str] = []
        self.stubborn = False
        self._ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def become_ready(self, address: str) -> None:
        self._ready.set_result(address)

    def exit(self, code: int) -> None:
        if not self._ready.done():
            self._ready.set_result(None)
        if not self._code.done():
            self._code.set_result(code)

    async def ready(self) -> str | None:
        return await asyncio.shield(self._ready)

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        self.signals.append("TERM")
        if not self.stubborn:
            self.exit(0)

    def kill(self) -> None:
        self.signals.append("KILL")
        self.exit(-9)


class Nursery:
    """Starts fakes and lets a test wait for the next one."""

    def __init__(self) -> None:
        self._born: asyncio.Queue[FakeChild] = asyncio.Queue()
        self.refusals: list[OSError] = []
        """What the next starts raise."""

    def start(self) -> FakeChild:
        if self.refusals:
            raise self.refusals.pop()
        child = FakeChild()
        self._born.put_nowait(child)
        return child

    async def next_child(self) -> FakeChild:
        return await asyncio.wait_for(self._born.get(), DEADLINE_S)

    @property
    def is_empty(self) -> bool:
        return self._born.empty()


class FakeHealth:
    """The health of whatever child is asked."""

    def __init__(self) -> None:
        self.frozen = False
        self.asked = asyncio.Event()
        self.is_open = False

    def connect(self, address: str) -> Self:
        return self

    async def __aenter__(self) -> Self:
        self.is_open = True
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.is_open = False

    async def serving(self, service: str, *, timeout_s: float) -> bool:
        assert service == LIVENESS
        assert self.is_open
        self.asked.set()
        if self.frozen:
            raise DeadlineExceeded(f"no answer in {timeout_s:g} s")
        return True


@pytest.fixture
async def health() -> FakeHealth:
    return FakeHealth()


@pytest.fixture
def nursery() -> Nursery:
    return Nursery()


@pytest.fixture
async def supervisor(nursery: Nursery, health: FakeHealth) -> Supervisor:
    policy = RestartPolicy(ManualClock(), first_delay_s=0, max_failed_starts=2)
    return Supervisor(
        "decode-0", nursery.start, health.connect, policy, stop_grace_s=DEADLINE_S, check_s=0.001, frozen_grace_s=0.05
    )


@pytest.fixture
async def running(supervisor: Supervisor) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(supervisor.run())
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_address_is_that_of_the_first_life(
    nursery: Nursery, supervisor: Supervisor, running: asyncio.Task[None]
) -> None:
    first = await nursery.next_child()
    first.become_ready("127.0.0.1:1")
    assert await asyncio.wait_for(supervisor.address(), DEADLINE_S) == "127.0.0.1:1"
    first.exit(-9)
    (await nursery.next_child()).become_ready("127.0.0.1:2")
    assert await supervisor.address() == "127.0.0.1:1"


async def test_refused_options_end_it_with_the_words_of_the_child(
    nursery: Nursery, running: asyncio.Task[None]
) -> None:
    (await nursery.next_child()).exit(2)
    with pytest.raises(ConfigError) as caught:
        await asyncio.wait_for(running, DEADLINE_S)
    assert caught.value.message == "decode-0: --kv-blocks: too many"


async def test_a_child_that_never_gets_ready_ends_it(nursery: Nursery, running: asyncio.Task[None]) -> None:
    (await nursery.next_child()).exit(1)
    (await nursery.next_child()).exit(1)
    with pytest.raises(Unavailable, match="decode-0 exits with code 1"):
        await asyncio.wait_for(running, DEADLINE_S)


@pytest.mark.parametrize("code", [0, 1, 2, -9])
async def test_a_child_that_was_ready_is_replaced_whatever_its_code(
    nursery: Nursery, running: asyncio.Task[None], code: int
) -> None:
    for _ in range(3):
        child = await nursery.next_child()
        child.become_ready("127.0.0.1:1")
        child.exit(code)
    await nursery.next_child()


async def test_a_child_that_cannot_be_started_now_is_started_later(
    nursery: Nursery, running: asyncio.Task[None]
) -> None:
    first = await nursery.next_child()
    first.become_ready("127.0.0.1:1")
    nursery.refusals = [OSError(errno.EAGAIN, "no process left"), OSError(errno.ENOMEM, "no memory left")]
    first.exit(-9)
    await nursery.next_child()
    assert nursery.refusals == []


async def test_a_child_that_can_never_be_started_ends_it_with_the_reason(
    nursery: Nursery, supervisor: Supervisor
) -> None:
    nursery.refusals = 2 * [OSError(errno.ENOMEM, "no memory left")]
    with pytest.raises(Unavailable, match=r"decode-0 .* no memory left"):
        await asyncio.wait_for(supervisor.run(), DEADLINE_S)


async def test_a_frozen_child_is_killed_and_replaced(
    nursery: Nursery, health: FakeHealth, running: asyncio.Task[None]
) -> None:
    frozen = await nursery.next_child()
    frozen.become_ready("127.0.0.1:1")
    await asyncio.wait_for(health.asked.wait(), DEADLINE_S)
    assert frozen.signals == []
    health.frozen = True
    successor = await nursery.next_child()
    assert frozen.signals == ["KILL"]
    assert successor.signals == []


async def test_a_child_that_does_not_get_ready_in_time_is_killed(nursery: Nursery, health: FakeHealth) -> None:
    policy = RestartPolicy(ManualClock(), first_delay_s=0, max_failed_starts=1)
    supervisor = Supervisor("decode-0", nursery.start, health.connect, policy, DEADLINE_S, start_timeout_s=0.01)
    with pytest.raises(Unavailable, match="code -9 before it is ready"):
        await asyncio.wait_for(supervisor.run(), DEADLINE_S)
    assert (await nursery.next_child()).signals == ["KILL"]


async def test_a_frozen_child_does_not_get_the_grace_of_one_that_drains(
    nursery: Nursery, health: FakeHealth, running: asyncio.Task[None], supervisor: Supervisor
) -> None:
    child = await nursery.next_child()
    child.stubborn = True
    child.become_ready("127.0.0.1:1")
    await asyncio.wait_for(health.asked.wait(), DEADLINE_S)
    health.frozen = True
    await asyncio.wait_for(supervisor.stop(), DEADLINE_S / 2)
    assert child.signals[0] in {"TERM", "KILL"}
    assert child.signals[-1] == "KILL"
    assert nursery.is_empty


async def test_stop_asks_once_and_does_not_restart(
    nursery: Nursery, supervisor: Supervisor, running: asyncio.Task[None]
) -> None:
    child = await nursery.next_child()
    child.become_ready("127.0.0.1:1")
    await supervisor.stop()
    await asyncio.wait_for(running, DEADLINE_S)
    assert child.signals == ["TERM"]
    assert nursery.is_empty


async def test_stop_kills_a_child_that_does_not_end(nursery: Nursery, health: FakeHealth) -> None:
    supervisor = Supervisor("decode-0", nursery.start, health.connect, RestartPolicy(ManualClock()), stop_grace_s=0.05)
    running = asyncio.create_task(supervisor.run())
    child = await nursery.next_child()
    child.stubborn = True
    child.become_ready("127.0.0.1:1")
    await asyncio.wait_for(health.asked.wait(), DEADLINE_S)
    await supervisor.stop()
    await asyncio.wait_for(running, DEADLINE_S)
    assert child.signals == ["TERM", "KILL"]


async def test_stop_cuts_the_delay_before_a_restart_short(nursery: Nursery, health: FakeHealth) -> None:
    policy = RestartPolicy(ManualClock(), first_delay_s=1000, max_delay_s=1000)
    supervisor = Supervisor("decode-0", nursery.start, health.connect, policy, stop_grace_s=DEADLINE_S)
    running = asyncio.create_task(supervisor.run())
    child = await nursery.next_child()
    child.become_ready("127.0.0.1:1")
    child.exit(-9)
    await supervisor.stop()
    await asyncio.wait_for(running, DEADLINE_S)
    assert nursery.is_empty


async def test_cancelling_it_kills_the_child(nursery: Nursery, running: asyncio.Task[None]) -> None:
    child = await nursery.next_child()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert child.signals == ["KILL"]


async def test_stopping_before_the_first_start_starts_nothing(nursery: Nursery, supervisor: Supervisor) -> None:
    supervisor.kill()
    await supervisor.run()
    await supervisor.stop()
    assert nursery.is_empty
