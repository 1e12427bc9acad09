"""gRPC settings that every server and channel of a worker shares."""

from __future__ import annotations

KEEPALIVE_S = 10.0
"""A vanished host is noticed without traffic, and its streams end."""

_PING: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options of a server that takes messages of at most `max_message_bytes`."""
    return [
        *_PING,
        # Two workers on one port would share its routers at random.
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
    ]


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options of a channel to another worker: its own connection, no proxy, no wait that we did not ask for."""
    return [
        *_PING,
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
    ]
