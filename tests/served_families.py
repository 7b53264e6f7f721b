"""`python -m tests.served_families …`: `bench.exactness`, whose served systems are forks of one process.

The same arguments. A fleet that is started costs imports of torch in each of its processes, which is most of what a
served cell takes; here they are forked as those of end-to-end tests are.
"""

from __future__ import annotations

import sys

import bench.support.cluster
from bench import exactness
from tests.forked_commands import forking


def main() -> int:
    """Returns the exit code."""
    with forking() as open_command:
        bench.support.cluster.open_command = open_command  # type: ignore[assignment]
        return exactness.main()


if __name__ == "__main__":
    sys.exit(main())
