"""Channels: how every Tandem process dials another, and the transport options of both ends."""

from __future__ import annotations

import grpc
import grpc.aio

from tandem.rpc.tls import channel_credentials
from tandem.security.credentials import Outgoing

ChannelOptions = list[tuple[str, int]]
MixedOptions = list[tuple[str, str | int]]

MAX_RECEIVE_BYTES = 8 * 1024 * 1024
"""Largest message taken, where no option says otherwise."""
_PING_EVERY_MS = 750
_PING_TIMEOUT_MS = 2500
CONNECT_TIMEOUT_S = 5.0
"""Given to one attempt to connect, handshake included; a refusal is known at once."""
_PLAIN = Outgoing()


def keepalive_options() -> ChannelOptions:
    """Detects a peer that stopped without closing within 3.25 s; one that stalls for less than 2.5 s is kept.

    `grpc.keepalive_timeout_ms` has no effect in this library; the ping timeout has.
    """
    return [
        ("grpc.keepalive_time_ms", _PING_EVERY_MS),
        ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def open_channel(
    address: str,
    outgoing: Outgoing = _PLAIN,
    *,
    called: str | None = None,
    max_receive_bytes: int = MAX_RECEIVE_BYTES,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    more_options: MixedOptions | None = None,
) -> grpc.aio.Channel:
    """A channel to `HOST:PORT`; the caller closes it. Connects lazily, never through a proxy.

    TLS as `outgoing` says; its token goes with each call (`Outgoing.metadata`). `called` is the name
    that stood for `address` and that the certificate bears, unless `outgoing` has a name for all.
    `max_receive_bytes`: −1 = any.
    """
    options, credentials = _prepared(outgoing, called, max_receive_bytes, connect_timeout_s, more_options)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def open_blocking_channel(
    address: str,
    outgoing: Outgoing = _PLAIN,
    *,
    max_receive_bytes: int = MAX_RECEIVE_BYTES,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    more_options: MixedOptions | None = None,
) -> grpc.Channel:
    """As `open_channel`, for callers without an event loop."""
    options, credentials = _prepared(outgoing, None, max_receive_bytes, connect_timeout_s, more_options)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def _prepared(
    outgoing: Outgoing,
    called: str | None,
    max_receive_bytes: int,
    connect_timeout_s: float,
    more_options: MixedOptions | None,
) -> tuple[MixedOptions, grpc.ChannelCredentials | None]:
    """The transport options of a channel, asynchronous or not; without credentials it is a plain one."""
    options: MixedOptions = [
        *keepalive_options(),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", int(connect_timeout_s * 1000)),  # despite its name, only that
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),  # a new channel never inherits another's back-off
        *(more_options or ()),
    ]
    if outgoing.tls is None:
        return options, None
    name = outgoing.tls.server_name or called
    if name is not None:
        options.append(("grpc.ssl_target_name_override", name))
    return options, channel_credentials(outgoing.tls)
