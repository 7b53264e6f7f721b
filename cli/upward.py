"""The one door through which a command reaches packages above this one, by name and at run time.

The layers forbid importing them from here, and rightly: a client's machine has neither torch nor
any need of the workers. So that is also where their absence becomes a message.
"""

from __future__ import annotations

import importlib
from typing import Any

from tandem.errors import ConfigError


def import_upward(module: str) -> Any:
    """The module. Raises ConfigError if a library that it needs is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(module, f"needs {error.name}; install tandem[worker]") from error
