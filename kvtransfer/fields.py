"""Named text values as bytes: `name=value` lines, bounded and strict. Pure.

Used for HELLO and endpoints, where a person reading a capture should see what was said.
"""

from __future__ import annotations

from collections.abc import Mapping

from tandem.errors import FrameError

MAX_FIELDS_BYTES = 16 * 1024


def encode_fields(fields: Mapping[str, str]) -> bytes:
    """One line per field. Raises FrameError if a name or value could not be read back."""
    for name, value in fields.items():
        if not name or "=" in name or "\n" in name + value:
            raise FrameError(f"field {name!r} cannot be encoded")
    data = "\n".join(f"{name}={value}" for name, value in fields.items()).encode()
    if len(data) > MAX_FIELDS_BYTES:
        raise FrameError(f"fields of {len(data)} bytes exceed {MAX_FIELDS_BYTES}")
    return data


def decode_fields(data: bytes) -> dict[str, str]:
    """The reverse. Raises FrameError on bad text, an unnamed or a repeated field."""
    if len(data) > MAX_FIELDS_BYTES:
        raise FrameError(f"fields of {len(data)} bytes exceed {MAX_FIELDS_BYTES}")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise FrameError("fields are not UTF-8") from error
    fields: dict[str, str] = {}
    for line in text.split("\n") if text else ():
        name, equals, value = line.partition("=")
        if not name or not equals or name in fields:
            raise FrameError(f"field {len(fields)} is unnamed, without a value, or repeated")
        fields[name] = value
    return fields


def required(fields: Mapping[str, str], name: str) -> str:
    """Returns the field's value. Raises FrameError if the field is absent."""
    if name not in fields:
        raise FrameError(f"field {name} is missing")
    return fields[name]


def required_int(fields: Mapping[str, str], name: str, highest: int) -> int:
    """The field as a number in `[0, highest]`. Raises FrameError if it is not one."""
    text = required(fields, name)
    if not (text.isascii() and text.isdigit() and len(text) <= 20) or int(text) > highest:
        raise FrameError(f"field {name} is not a number up to {highest}")
    return int(text)


def with_prefix(fields: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The fields whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
