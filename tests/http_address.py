"""Where a cluster's HTTP port listens."""

from __future__ import annotations

import re

from bench.support.cluster import Cluster, eventually


def http_address(cluster: Cluster) -> str:
    """HOST:PORT, as the router's log says."""

    def told() -> list[str]:
        return re.findall(r"info router http address=(\S+)", "\n".join(cluster.log))

    assert eventually(told), cluster.log
    return told()[0]
