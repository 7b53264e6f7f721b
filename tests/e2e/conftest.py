"""Real processes on loopback: `tandem serve` and what tests ask of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.support import cluster
from bench.support.cluster import Cluster, becomes_idle, open_command, serve
from models.demo.text import Story, make_story
from shell.telemetry.metric import Process
from shell.telemetry.metric_names import REQUESTS
from tandem.client import Client
from tests.at_rest import nothing_runs
from tests.forked_commands import Forking
from tests.scraped import counted, expositions


@pytest.fixture(scope="session", autouse=True)
def forked_commands(fork_command: Forking) -> Iterator[None]:
    """What `bench.support.cluster` starts is forked: nothing is imported once more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "open_command", fork_command)
        yield


@pytest.fixture(scope="module")
def real_commands(forked_commands: None) -> Iterator[None]:
    """For files whose tests are about how processes start, with `usefixtures`: what they start is not forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "open_command", open_command)
        yield


class Demo:
    """One cluster for all tests of this folder. It ends with the last of them: an idle one takes 3 % of a core."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._cluster: Cluster | None = None

    def cluster(self) -> Cluster:
        if self._cluster is None:
            self._cluster = self._stack.enter_context(serve("demo", "--prefill", "1", "--decode", "1"))
        return self._cluster

    def close(self) -> None:
        self._cluster = None
        self._stack.close()


DEMO = Demo()


@pytest.fixture(scope="module")
def demo_cluster() -> Iterator[Cluster]:
    """Router, one prefill and one decode worker on the demo model; after each file every block must be free again."""
    cluster = DEMO.cluster()
    yield cluster
    with Client(cluster.target) as client:
        assert becomes_idle(client), client.status()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Called for the tests of this folder."""
    try:
        yield
    finally:
        if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
            DEMO.close()


@pytest.fixture
def client(demo_cluster: Cluster) -> Iterator[Client]:
    """A client of the demo cluster; afterwards no request may be under way."""
    with Client(demo_cluster.target) as client:
        client.wait_ready(timeout_s=30)
        yield client
        assert nothing_runs(client), client.status()


@pytest.fixture
def num_cancelled(client: Client) -> Callable[[], int]:
    """Counts requests whose callers left before the end. Idle workers alone prove no cancel: all work ends."""

    def count() -> int:
        return int(counted(expositions(client)[Process.ROUTER], REQUESTS.name, outcome="cancelled"))

    return count


@pytest.fixture
def story() -> Story:
    """A story about six people, always the same."""
    return make_story(random.Random(2), 6)
