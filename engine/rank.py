"""`python -m engine.rank PARENT LINK SLOTS GROUP`: a process that follows rank 0 (`engine.follower`), started by it.

The last three are descriptors. The process is bound to its parent before torch is imported, which takes seconds.
"""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection

from shell.parent import end_with


def main() -> int:
    """Returns the exit code."""
    parent, link, slots, memory = map(int, sys.argv[1:])
    end_with(parent)
    for signum in (signal.SIGINT, signal.SIGTERM):  # a terminal or a service manager asks all: rank 0 drains first
        signal.signal(signum, signal.SIG_IGN)
    from engine.follower import follow
    from engine.rank_link import StepSlots
    from kernels.group import GroupBroken
    from shell.telemetry.logging import get_logger
    from tandem.errors import TandemError

    try:
        follow(Connection(link), StepSlots(slots), memory)
    except TandemError as error:  # for the operator, as rank 0 says it: one line
        get_logger(__name__).error("the rank ends", why=error.message)
        return 1
    except GroupBroken as error:
        get_logger(__name__).error("the rank ends", why=str(error), exc_info=error.__cause__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
