"""Real processes on loopback: `tandem serve` and what tests ask of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from bench.cluster import Cluster, becomes_idle, serve
from models.demo.text import Story, make_story
from tandem.client import Client
from tandem.telemetry.metric import Process
from tandem.telemetry.metric_names import REQUESTS
from tests.scraped import counted, expositions


@pytest.fixture(scope="session")
def demo_cluster() -> Iterator[Cluster]:
    """Router, one prefill and one decode worker on the demo model."""
    with serve("demo", "--prefill", "1", "--decode", "1") as cluster:
        yield cluster


@pytest.fixture
def client(demo_cluster: Cluster) -> Iterator[Client]:
    """A client of the demo cluster; afterwards every block must be free again."""
    with Client(demo_cluster.target) as client:
        client.wait_ready(timeout_s=30)
        yield client
        assert becomes_idle(client), client.status()


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
