"""`enum.StrEnum`, which Python 3.10 lacks: clients run there too."""

from __future__ import annotations

import enum
import sys

__all__ = ["StrEnum"]

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:

    class StrEnum(str, enum.Enum):
        """Members are their values, also in text."""

        __str__ = str.__str__
        __format__ = str.__format__
