"""Every service, method, message, field number and enum value that clients rely on, frozen.

`python tests/contract/test_proto_names.py` rewrites the golden file after an intended change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from tandem.v1 import cluster_pb2, inference_pb2, registry_pb2, worker_pb2

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "proto_names.json"
FILES: list[FileDescriptor] = [each.DESCRIPTOR for each in (inference_pb2, cluster_pb2, registry_pb2, worker_pb2)]


def _type_name(field: FieldDescriptor) -> str:
    names = {value: name[5:].lower() for name, value in vars(FieldDescriptor).items() if name.startswith("TYPE_")}
    target = field.message_type or field.enum_type
    return target.full_name if target is not None else names[field.type]


def _field(field: FieldDescriptor) -> str:
    label = "repeated " if field.is_repeated else "optional " if field.has_presence else ""
    choice = field.containing_oneof
    member = f" in {choice.name}" if choice is not None and not choice.name.startswith("_") else ""
    return f"{label}{_type_name(field)} {field.name} = {field.number}{member}"


def _messages(messages: list[Descriptor]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for message in messages:
        found[message.full_name] = [_field(field) for field in message.fields]
        found |= _messages(list(message.nested_types))
    return found


def surface() -> dict[str, Any]:
    """The whole API, as plain data."""
    services: dict[str, list[str]] = {}
    messages: dict[str, list[str]] = {}
    enums: dict[str, dict[str, int]] = {}
    for file in FILES:
        for service in file.services_by_name.values():
            services[service.full_name] = [
                f"{method.name}({'stream ' * method.client_streaming}{method.input_type.full_name})"
                f" -> {'stream ' * method.server_streaming}{method.output_type.full_name}"
                for method in service.methods
            ]
        messages |= _messages(list(file.message_types_by_name.values()))
        for enum in file.enum_types_by_name.values():
            enums[enum.full_name] = {value.name: value.number for value in enum.values}
    return {"services": services, "messages": messages, "enums": enums}


def test_the_api_is_what_was_promised() -> None:
    assert surface() == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(surface(), indent=2) + "\n")
