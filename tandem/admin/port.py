"""The admin port, put together: front door, HTTP site, and the private gRPC server behind.

    caller ──▶ front door ──HTTP/1.1──▶ site            metrics, page, status, probes
                   └────────HTTP/2────▶ private socket ──▶ gRPC: channelz, health, reflection

Channelz tells of every channel and server of the process: gRPC keeps it for the whole of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from grpc_channelz.v1.channelz_pb2_grpc import add_ChannelzServicer_to_server

from tandem.admin.channelz import SERVICE_NAME as CHANNELZ
from tandem.admin.channelz import ChannelzServicer
from tandem.admin.content import AdminContent
from tandem.admin.front_door import FrontDoor
from tandem.admin.hosts import Hosts
from tandem.admin.http_server import HttpServer
from tandem.admin.private_socket import PrivateSocket
from tandem.admin.site import Site
from tandem.rpc.address import advertised_admin_address
from tandem.rpc.server import RpcServer, Service
from tandem.security.credentials import Incoming
from tandem.telemetry.logging import get_logger

_log = get_logger(__name__)

_MAX_RECEIVE_BYTES = 64 * 1024


@asynccontextmanager
async def admin_port(
    listen: str | None, content: AdminContent, incoming: Incoming, advertise: str | None = None
) -> AsyncIterator[str]:
    """Serves while inside; gives the HOST:PORT at which it is reached, empty if `listen` is None.

    `advertise` is the process's own `--advertise`: its host goes for a port that listens on all addresses, too.
    Raises ConfigError if the address cannot be had.
    """
    if listen is None:
        yield ""
        return
    async with AsyncExitStack() as stack:
        socket = stack.enter_context(PrivateSocket())
        rpc = RpcServer(
            f"unix:{socket.bind_path}",
            [Service(CHANNELZ, partial(add_ChannelzServicer_to_server, ChannelzServicer()))],
            incoming=Incoming(None, incoming.tokens),  # TLS has ended at the front door
            max_receive_bytes=_MAX_RECEIVE_BYTES,
            announce_s=0.0,
            health_servicer=content.health,
        )
        await rpc.start()
        stack.push_async_callback(rpc.drain, 0.0)
        socket.seal()
        http = HttpServer(Site(content, Hosts(listen), incoming.tokens))
        stack.push_async_callback(http.stop)
        door = FrontDoor(http.handler, socket.connect_path, tls=incoming.tls)
        stack.push_async_callback(door.close)
        address = advertised_admin_address(listen, advertise, await door.open(listen))
        _log.info("admin port", address=address)
        yield address
