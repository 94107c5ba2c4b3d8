"""Options of every gRPC channel and server of this project; nodes add their own."""

from typing import Final

KEEPALIVE: Final = (
    # Both timeouts are needed: without the second a stopped peer is noticed only after a minute.
    # Three seconds hold three losses in a row of one segment on a way of 200 ms.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: Final = (
    *KEEPALIVE,
    ("grpc.enable_retries", 0),  # a step that ran twice would corrupt a cache
    # gRPC sends even loopback through the proxy of the environment; no peer is behind one.
    ("grpc.enable_http_proxy", 0),
)

SERVER_OPTIONS: Final = (
    *KEEPALIVE,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a port in use must be an error, not shared
    # Bytes: a request's messages and images, or one that is forwarded, may be as long as an HTTP
    # body; frames are far smaller.
    ("grpc.max_receive_message_length", 48 << 20),
)
