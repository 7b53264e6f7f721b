"""How every module logs: events with fields. `shell.telemetry.logging` configures where the lines go."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # in Python 3.10 it takes no type arguments


class Logger(_Adapter):
    """Logs events with fields: `log.info("worker registered", worker_id=..., role=...)`.

    `debug`: to find a bug; `info`: rare and normal; `warning`: something is wrong, and dealt with; `error`: something
    is wrong, and somebody must look; `exception`: as `error`, with the exception that is being handled.
    """

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Every keyword is a field, except `exc_info`, which is `logging`'s own."""
        return msg, {"exc_info": kwargs.pop("exc_info", None), "extra": {"fields": dict(kwargs)}}


def get_logger(name: str) -> Logger:
    """Returns a module's logger: `get_logger(__name__)`."""
    return Logger(logging.getLogger(name))
