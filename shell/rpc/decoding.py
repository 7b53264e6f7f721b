"""Request bytes to messages, with bytes that are no such message refused by field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf import empty_pb2, unknown_fields
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from tandem.errors import InvalidRequest

_LENGTH_DELIMITED = 2
_MAX_SEARCHED_BYTES = 16 * 1024
"""The search stops the event loop, for about a microsecond a byte where fields are empty."""


def decode_request(deserialize: Callable[[bytes], Any], raw: bytes) -> Any:
    """The message in `raw`; raises InvalidRequest naming the field that is not UTF-8, if that is why."""
    try:
        return deserialize(raw)
    except DecodeError as error:
        owner = getattr(deserialize, "__self__", None)  # `Message.FromString` is bound to its class
        descriptor = getattr(owner, "DESCRIPTOR", None)
        path = _invalid_text(descriptor, raw) if isinstance(descriptor, Descriptor) else None
        if path is not None:
            raise InvalidRequest(path, "is not valid UTF-8") from error
        raise InvalidRequest("request", "is not a message of this method") from error


def _invalid_text(descriptor: Descriptor, raw: bytes) -> str | None:
    """Path of the first string field in `raw` that is not UTF-8; not looked for in a long `raw`."""
    if len(raw) > _MAX_SEARCHED_BYTES:
        return None
    try:
        shell: Message = empty_pb2.Empty.FromString(raw)
    except DecodeError:
        return None
    unknown: Any = unknown_fields.UnknownFieldSet(shell)  # its stub lacks __iter__
    for each in unknown:
        field = descriptor.fields_by_number.get(each.field_number)
        if field is None or each.wire_type != _LENGTH_DELIMITED:
            continue
        path = _invalid_in_field(field, each.data)
        if path is not None:
            return path
    return None


def _invalid_in_field(field: FieldDescriptor, data: bytes) -> str | None:
    if field.type == FieldDescriptor.TYPE_STRING:
        try:
            data.decode()
        except UnicodeDecodeError:
            return field.name
    elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
        inner = _invalid_text(field.message_type, data)
        return None if inner is None else f"{field.name}.{inner}"
    return None
