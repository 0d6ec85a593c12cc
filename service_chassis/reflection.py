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


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Serve reflection of ``services`` (full names) and of the reflection services themselves."""
    _register_v1_descriptors()
    reflections = (f"{_V1}.ServerReflection", f"{_V1ALPHA}.ServerReflection")
    servicer = reflection.aio.ReflectionServicer((*services, *reflections))
    # The wire form is the same: v1 bytes are read, and answered, as v1alpha messages.
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers(tuple(grpc.method_handlers_generic_handler(name, methods) for name in reflections))


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
            if field.type_name:  # a message; scalars have none, and must not be given an empty one
                field.type_name = field.type_name.replace(f".{_V1ALPHA}.", f".{_V1}.")
    for service in renamed.service:
        for method in service.method:
            method.input_type = method.input_type.replace(f".{_V1ALPHA}.", f".{_V1}.")
            method.output_type = method.output_type.replace(f".{_V1ALPHA}.", f".{_V1}.")
    pool.Add(renamed)
