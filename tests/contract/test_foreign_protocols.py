"""What we describe of foreign protocols agrees with their owners' packages, name by name and number by number."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

from tandem.foreign import kserve_model_config_pb2, kserve_pb2, smg_common_pb2
from tandem.foreign import vllm_engine_pb2 as our_engine_pb2

PAIRS = [
    (kserve_pb2.DESCRIPTOR, service_pb2.DESCRIPTOR),
    (kserve_model_config_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR),
    (our_engine_pb2.DESCRIPTOR, vllm_engine_pb2.DESCRIPTOR),
    (smg_common_pb2.DESCRIPTOR, common_pb2.DESCRIPTOR),
]
IDS = [ours.name.rpartition("/")[2] for ours, _ in PAIRS]


def field_shape(field: FieldDescriptor) -> tuple[object, ...]:
    target = field.message_type or field.enum_type
    choice = field.containing_oneof
    return (
        field.name,
        field.type,
        field.is_repeated,
        field.has_presence,
        None if target is None else target.full_name,
        None if choice is None else choice.name,
    )


def differences(ours: Descriptor, theirs: Descriptor | None) -> list[str]:
    if theirs is None:
        return [f"{ours.full_name} is not theirs"]
    found = [
        f"{ours.full_name}.{field.name}"
        for field in ours.fields
        if field.number not in theirs.fields_by_number
        or field_shape(field) != field_shape(theirs.fields_by_number[field.number])
    ]
    for nested in ours.nested_types:
        found += differences(nested, theirs.nested_types_by_name.get(nested.name))
    return found


def enum_values(enum: EnumDescriptor) -> dict[str, int]:
    return {value.name: value.number for value in enum.values}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=IDS)
def test_every_message_field_is_theirs(ours: FileDescriptor, theirs: FileDescriptor) -> None:
    messages = ours.message_types_by_name
    assert messages
    assert ours.package == theirs.package
    assert [
        each for name in messages for each in differences(messages[name], theirs.message_types_by_name.get(name))
    ] == []


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=IDS)
def test_every_enum_is_theirs(ours: FileDescriptor, theirs: FileDescriptor) -> None:
    for name, enum in ours.enum_types_by_name.items():
        assert enum_values(enum) == enum_values(theirs.enum_types_by_name[name])


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=IDS)
def test_every_method_is_theirs(ours: FileDescriptor, theirs: FileDescriptor) -> None:
    for name, service in ours.services_by_name.items():
        methods = theirs.services_by_name[name].methods_by_name
        for method in service.methods:
            same = methods[method.name]
            assert (method.input_type.full_name, method.client_streaming) == (
                same.input_type.full_name,
                same.client_streaming,
            )
            assert (method.output_type.full_name, method.server_streaming) == (
                same.output_type.full_name,
                same.server_streaming,
            )
