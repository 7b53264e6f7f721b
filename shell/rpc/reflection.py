"""Server reflection, v1 and v1alpha: what grpcurl and buf curl read.

grpcio-reflection serves v1alpha only. v1 has the same messages under another package name, so
v1alpha's file is copied under that name and its servicer answers both. Foreign protocols are
described from their own descriptor pool (see `tandem.foreign.pool`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from tandem.foreign import pool as foreign_pool

V1_SERVICE_NAME = "grpc.reflection.v1.ServerReflection"
SERVICE_NAMES = (V1_SERVICE_NAME, reflection.SERVICE_NAME)


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Describes `service_names`, and reflection itself, in both versions."""
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer([*service_names, *SERVICE_NAMES], pool=_Pools())
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(V1_SERVICE_NAME, {"ServerReflectionInfo": handler}),)
    )


class _Pools:
    """What the servicer calls of a descriptor pool, answered from the foreign one, then from protobuf's default.

    In this order: a process may also have loaded the foreign protocols' own packages, and what is served is ours.
    """

    def FindFileByName(self, name: str) -> Any:  # noqa: N802
        return _first(lambda pool: pool.FindFileByName(name))

    def FindFileContainingSymbol(self, name: str) -> Any:  # noqa: N802
        """Finds methods as well, which pools do not find."""
        try:
            return _first(lambda pool: pool.FindFileContainingSymbol(name))
        except KeyError:
            service_name, _, method = name.rpartition(".")
            service = _first(lambda pool: pool.FindServiceByName(service_name))
            return service.methods_by_name[method].containing_service.file

    def FindMessageTypeByName(self, name: str) -> Any:  # noqa: N802
        return _first(lambda pool: pool.FindMessageTypeByName(name))

    def FindExtensionByNumber(self, message: Any, number: int) -> Any:  # noqa: N802
        return message.file.pool.FindExtensionByNumber(message, number)

    def FindAllExtensions(self, message: Any) -> Any:  # noqa: N802
        return message.file.pool.FindAllExtensions(message)


def _first(find: Callable[[Any], Any]) -> Any:
    """Raises KeyError, as a pool does, if none knows."""
    try:
        return find(foreign_pool.Default())
    except KeyError:
        return find(descriptor_pool.Default())


def _describe_v1() -> None:
    pool = descriptor_pool.Default()
    try:
        pool.FindFileContainingSymbol(V1_SERVICE_NAME)
    except KeyError:
        v1alpha = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(v1alpha)
        renamed = text_format.MessageToString(v1alpha).replace("v1alpha", "v1")
        pool.AddSerializedFile(text_format.Parse(renamed, descriptor_pb2.FileDescriptorProto()).SerializeToString())
