"""Talk to a Maniple server: ``Client`` for synchronous programs, ``AsyncClient`` for asyncio.

Needs grpc, the generated messages and nothing else of the server.
"""

from maniple_client.admin import Admin, AsyncAdmin, PauseMode
from maniple_client.aio import AsyncClient, AsyncGenerationStream
from maniple_client.channel import DEFAULT_ADDRESS
from maniple_client.client import Client, GenerationStream
from maniple_client.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FieldViolation,
    InternalError,
    InvalidArgument,
    ManipleError,
    NotBuilt,
    NotFound,
    Overloaded,
    PermissionDenied,
    TransportLost,
    Unauthenticated,
    Unavailable,
    WrongState,
)
from maniple_client.events import Chunk, Done, Event, Finished, Logprobs, Sample, Started, TokenLogprob, Transcript
from maniple_client.requests import Embedding, Message, Options, Sampling
from maniple_client.security import Tls, token_in

__all__ = [
    "DEFAULT_ADDRESS",
    "Aborted",
    "Admin",
    "AlreadyExists",
    "AsyncAdmin",
    "AsyncClient",
    "AsyncGenerationStream",
    "Cancelled",
    "Chunk",
    "Client",
    "DataLoss",
    "DeadlineExceeded",
    "Done",
    "Embedding",
    "Event",
    "FieldViolation",
    "Finished",
    "GenerationStream",
    "InternalError",
    "InvalidArgument",
    "Logprobs",
    "ManipleError",
    "Message",
    "NotBuilt",
    "NotFound",
    "Options",
    "Overloaded",
    "PauseMode",
    "PermissionDenied",
    "Sample",
    "Sampling",
    "Started",
    "Tls",
    "TokenLogprob",
    "Transcript",
    "TransportLost",
    "Unauthenticated",
    "Unavailable",
    "WrongState",
    "token_in",
]
