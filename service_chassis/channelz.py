"""Tell of connections, calls and sockets of this process: ``grpc.channelz.v1``, for people with grpcdebug or grpcui."""

from __future__ import annotations

import grpc
from grpc_channelz.v1 import channelz_pb2_grpc
from grpc_channelz.v1.channelz import aio

CHANNELZ = "grpc.channelz.v1.Channelz"


def add_channelz(server: grpc.aio.Server) -> None:
    """Serve it. What it says is about all servers and channels of the process, peers' addresses among it."""
    channelz_pb2_grpc.add_ChannelzServicer_to_server(aio.ChannelzServicer(), server)
