"""Serve gRPC reflection in both its versions, so that grpcurl, buf curl and older tools find the services.

grpcio-reflection carries v1alpha only. v1 has the same messages under another package name: its descriptors are derived
from v1alpha's and the same servicer answers both.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

_V1 = "grpc.reflection.v1"
_V1ALPHA = "grpc.reflection.v1alpha"
_V1_FILE = "grpc/reflection/v1/reflection.proto"
_METHOD = "ServerReflectionInfo"


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Serve reflection of ``services`` (full names) and of the reflection services themselves."""
    _register_v1_descriptors()
    names = (*services, f"{_V1}.ServerReflection", reflection.SERVICE_NAME)
    servicer = reflection.aio.ReflectionServicer(names)
    reflection.reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    # The wire form is the same: v1 bytes are read, and answered, as v1alpha messages.
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    generic = grpc.method_handlers_generic_handler(f"{_V1}.ServerReflection", {_METHOD: handler})
    server.add_generic_rpc_handlers((generic,))


def _register_v1_descriptors() -> None:
    """Put v1's file into the default pool, once."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_V1_FILE)
        return
    except KeyError:
        pass
    renamed = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(renamed)
    renamed.name = _V1_FILE
    renamed.package = _V1
    renamed.ClearField("options")
    for message in renamed.message_type:
        for field in message.field:
            field.type_name = field.type_name.replace(f".{_V1ALPHA}.", f".{_V1}.")
    for service in renamed.service:
        for method in service.method:
            method.input_type = method.input_type.replace(f".{_V1ALPHA}.", f".{_V1}.")
            method.output_type = method.output_type.replace(f".{_V1ALPHA}.", f".{_V1}.")
    pool.Add(renamed)
