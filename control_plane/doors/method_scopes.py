"""Say which scope each method of each door needs. A method that is missing here is served to nobody.

``inference`` is for whoever has something computed, ``status`` for whoever looks and changes nothing, ``admin`` for
what touches other callers' requests or shows what they sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from service_chassis.auth import ANY_CALLER, PUBLIC
from service_chassis.callers import ADMIN, INFERENCE, STATUS

_SERVICES: Mapping[str, Mapping[str, Iterable[str]]] = {
    "maniple.v1.InferenceService": {
        INFERENCE: ("Generate", "Resume", "Abort", "Tokenize", "Detokenize", "GetModel", "Embed"),
    },
    "maniple.v1.AdminService": {
        STATUS: ("GetStatus", "IsPaused", "IsSleeping", "ListLoras"),
        ADMIN: (
            "Drain",
            "PauseGeneration",
            "ResumeGeneration",
            "Sleep",
            "WakeUp",
            "ResetPrefixCache",
            "LoadLora",
            "UnloadLora",
            "UpdateWeights",
            "StartProfile",
            "StopProfile",
        ),
    },
    "vllm.grpc.engine.VllmEngine": {
        INFERENCE: (
            "Generate",
            "Embed",
            "Abort",
            "HealthCheck",
            "GetModelInfo",
            "GetServerInfo",
            "GetLoads",
            "GetTokenizer",
        ),
        # Events of the KV cache carry the tokens of everybody's prompts.
        ADMIN: ("FlushCache", "StartProfile", "StopProfile", "SubscribeKvEvents"),
    },
    "inference.GRPCInferenceService": {
        PUBLIC: ("ServerLive", "ServerReady"),
        INFERENCE: (
            "ModelReady",
            "ServerMetadata",
            "ModelMetadata",
            "ModelInfer",
            "ModelStreamInfer",
            "ModelConfig",
            "RepositoryIndex",
        ),
        ADMIN: (
            "ModelStatistics",
            "RepositoryModelLoad",
            "RepositoryModelUnload",
            "SystemSharedMemoryStatus",
            "SystemSharedMemoryRegister",
            "SystemSharedMemoryUnregister",
            "CudaSharedMemoryStatus",
            "CudaSharedMemoryRegister",
            "CudaSharedMemoryUnregister",
            "TraceSetting",
            "LogSettings",
        ),
    },
    # Load balancers ask without a token. They learn whether it serves, and nothing of anybody.
    "grpc.health.v1.Health": {PUBLIC: ("Check", "Watch", "List")},
    # It tells the addresses of everybody who is connected.
    "grpc.channelz.v1.Channelz": {
        ADMIN: (
            "GetTopChannels",
            "GetServers",
            "GetServer",
            "GetServerSockets",
            "GetChannel",
            "GetSubchannel",
            "GetSocket",
        ),
    },
    # What it tells is published; whoever needs it is a person with credentials.
    "grpc.reflection.v1.ServerReflection": {ANY_CALLER: ("ServerReflectionInfo",)},
    "grpc.reflection.v1alpha.ServerReflection": {ANY_CALLER: ("ServerReflectionInfo",)},
}

SCOPES_OF_METHODS: Mapping[str, str] = {
    f"/{service}/{method}": scope
    for service, by_scope in _SERVICES.items()
    for scope, methods in by_scope.items()
    for method in methods
}
