"""How a client connects."""

from __future__ import annotations

DEFAULT_ADDRESS = "127.0.0.1:50051"

# The server takes 4 MiB; answers with log-probabilities or many tokens may be longer, and are bounded all the same.
MAX_RECEIVE_BYTES = 64 * 2**20

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", -1),  # the server names its limit in a proper error
    # A generation may be silent for minutes. Pings find a dead peer; they do not keep a proxy from timing out.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Calls are never retried below us: admission is at most once, and a retry is the caller's decision.
    ("grpc.enable_retries", 0),
)
