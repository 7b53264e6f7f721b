"""Messages of Google's that our clients read and send, so that a client needs grpcio and protobuf alone.

As much as is used of google/rpc/status.proto, google/rpc/error_details.proto and grpc/health/v1/health.proto. They are
in a descriptor pool of their own: a server has the generated ones as well, and a pool takes a file's names once.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_STRING = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
_BYTES = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
_INT32 = descriptor_pb2.FieldDescriptorProto.TYPE_INT32
_INT64 = descriptor_pb2.FieldDescriptorProto.TYPE_INT64
_MANY = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED

_FIELDS: dict[str, dict[str, int | str]] = {
    "Any": {"type_url": _STRING, "value": _BYTES},
    "Status": {"code": _INT32, "message": _STRING, "details": "Any"},
    "Entry": {"key": _STRING, "value": _STRING},  # of a map
    "ErrorInfo": {"reason": _STRING, "domain": _STRING, "metadata": "Entry"},
    "Duration": {"seconds": _INT64, "nanos": _INT32},
    "RetryInfo": {"retry_delay": "Duration"},
    "HealthCheckRequest": {"service": _STRING},
    "HealthCheckResponse": {"status": _INT32},
}
"""Fields in the order of their numbers, which begin at 1: a scalar type, or the name of a message."""
_REPEATED = {"details", "metadata"}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="google_messages.proto", package="of_google", syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for number, (field_name, kind) in enumerate(fields.items(), 1):
            field = message.field.add(name=field_name, number=number)
            if isinstance(kind, str):
                field.type, field.type_name = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE, f".of_google.{kind}"
            else:
                field.type = kind  # type: ignore[assignment]  # its stub has a type of its own for the number
            if field_name in _REPEATED:
                field.label = _MANY
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"of_google.{name}")) for name in _FIELDS}


_CLASSES = _classes()
Status, ErrorInfo, RetryInfo = _CLASSES["Status"], _CLASSES["ErrorInfo"], _CLASSES["RetryInfo"]
HealthCheckRequest = _CLASSES["HealthCheckRequest"]
SERVING = 1
"""`HealthCheckResponse.status` of a server that takes requests."""


def unpacked(details: Any, kind: Any) -> Any:
    """The first message of `kind` among a Status's details; None without one. Raises DecodeError."""
    urls = f"/google.rpc.{kind.DESCRIPTOR.name}"
    return next((kind.FromString(each.value) for each in details if each.type_url.endswith(urls)), None)


def health_watch(channel: grpc.Channel | grpc.aio.Channel) -> Any:
    """The stub of `grpc.health.v1.Health.Watch`."""
    return channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=HealthCheckRequest.SerializeToString,
        response_deserializer=_CLASSES["HealthCheckResponse"].FromString,
    )
