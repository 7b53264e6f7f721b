"""The limit of open files: checked when a process starts, and watched where connections are accepted.

gRPC accepts in its C core, which says nothing where no descriptor is left: callers wait, and nobody knows why.
"""

from __future__ import annotations

import os
import resource

from shell.clock import Clock
from shell.telemetry.logging import get_logger
from tandem.errors import ConfigError

_log = get_logger(__name__)

MIN_OPEN_FILES = 256
"""gRPC crashes, rather than fails, where it can open no more. A process without load has about forty open."""
_SPARE = 8
"""Descriptors; with fewer left connections fail, whatever the moment of the look finds."""
_WARN_EVERY_S = 60.0
_STDERR = 2


def check_open_files() -> None:
    """Raises ConfigError if the limit is too small for any process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < MIN_OPEN_FILES:
        raise ConfigError(
            "limit of open files", f"it is {limit}, at least {MIN_OPEN_FILES} are needed; raise it (ulimit -n 4096)"
        )


class OpenFiles:
    """Warns, once a minute at most, while hardly any descriptor is left."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._quiet_until_s = clock.now_s()

    def look(self) -> None:
        """Takes microseconds, however many files are open."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if self._clock.now_s() < self._quiet_until_s or limit - _lowest_free() > _SPARE:
            return
        self._quiet_until_s = self._clock.now_s() + _WARN_EVERY_S
        _log.warning("no more connections are accepted: raise the limit of open files (ulimit -n 65536)", limit=limit)


def _lowest_free() -> float:
    """The lowest descriptor that is free, which the system gives to the next file; all below it are open."""
    try:
        descriptor = os.dup(_STDERR)
    except OSError:
        return float("inf")
    os.close(descriptor)
    return descriptor
