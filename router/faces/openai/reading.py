"""From bytes to a typed request: every fault is named by its field."""

from __future__ import annotations

import difflib
import re
from typing import TypeVar

import msgspec

from tandem.errors import InvalidRequest

_UNKNOWN = re.compile(r"^Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(.*?)`(?: - at `\$\.?(.*)`)?$")
_WRONG = re.compile(r"^(.*) - at `\$\.?(.*)`$", re.DOTALL)
_MAX_NAME_CHARS = 64

T = TypeVar("T", bound=msgspec.Struct)


def read_body(body: bytes, kind: type[T]) -> T:
    """Returns the request that a JSON body holds. Raises InvalidRequest that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _fault(str(error), kind) from None  # the cause may quote the caller
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest("body", f"is not JSON: {error}") from None


def _fault(said: str, kind: type[msgspec.Struct]) -> InvalidRequest:
    if match := _UNKNOWN.match(said):
        name, at = match[1][:_MAX_NAME_CHARS], match[2]
        near = [] if at else difflib.get_close_matches(name, kind.__struct_fields__, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return InvalidRequest(f"{at}.{name}" if at else name, f"is not a field that is known here{hint}")
    if match := _MISSING.match(said):
        return InvalidRequest(f"{match[2]}.{match[1]}" if match[2] else match[1], "is missing")
    if match := _WRONG.match(said):
        return InvalidRequest(match[2], match[1][0].lower() + match[1][1:])
    return InvalidRequest("body", said)
