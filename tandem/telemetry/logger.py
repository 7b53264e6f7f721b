"""How every module logs: events with fields. `logging` configures where they go."""

from __future__ import annotations

import logging


class Logger:
    """Logs events with fields: `log.info("worker registered", worker_id=..., role=...)`."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: object) -> None:
        """For whoever is looking for a bug."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Rare and normal."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Something is wrong, and dealt with."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Something is wrong, and somebody must look."""
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """As `error`, with the exception that is being handled."""
        self._log(logging.ERROR, event, fields, with_exception=True)

    def _log(self, level: int, event: str, fields: dict[str, object], *, with_exception: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", event, extra={"fields": fields}, exc_info=with_exception)


def get_logger(name: str) -> Logger:
    """The logger of one module: `get_logger(__name__)`."""
    return Logger(logging.getLogger(name))
