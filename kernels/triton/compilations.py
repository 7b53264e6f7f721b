"""Says so when Triton compiles a kernel while requests are served, which makes one of them wait for seconds."""

from __future__ import annotations

from typing import Any

from triton import knobs

from kernels.triton import COMPILED
from shell.telemetry.logging import get_logger

_log = get_logger(__name__)


def warn_from_now_on() -> None:
    """For this process; to be called once all that is served has been compiled."""
    knobs.runtime.jit_post_compile_hook = _warn


def _warn(*, fn: Any, repr: str, **_: object) -> None:
    _log.warning(COMPILED, kernel=fn.name, arguments=repr)
