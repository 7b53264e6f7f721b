"""Real processes on loopback: `tandem serve` and what tests ask of it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from bench.cluster import Cluster, becomes_idle, serve
from models.demo.text import Story, make_story
from tandem.client import Client


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
def story() -> Story:
    """A story about six people, always the same."""
    return make_story(random.Random(2), 6)
