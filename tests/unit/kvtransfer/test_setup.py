"""What can be asked for, and what is refused by name before anything runs."""

import asyncio
import dataclasses
import socket

import pytest
import torch

from bench.support.ports import free_ports
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.transports import available, tcp, usable
from tandem.errors import ConfigError, InternalError
from tests.manual_clock import ManualClock
from tests.transports import PRINTS


def test_transports_work_for_pools_in_host_memory():
    assert [name for name in usable("cpu") if name != "nixl"] == ["shm", "tcp"]  # which needs a package
    assert all(status.reason for status in available("cpu"))


def test_pools_on_a_gpu_are_reached_through_host_memory():
    assert set(usable("cpu")) <= set(usable("cuda:0"))
    statuses = [status for status in available("cuda:0") if status.name in {"shm", "tcp"}]
    assert all("through host memory" in status.reason for status in statuses)


def test_transports_say_why_they_do_not_work():
    assert usable("meta") == ()
    assert "meta" in available("meta")[0].reason


def test_bytes_outside_host_memory_are_refused(make_pool):
    memory = dataclasses.replace(make_pool().memory, blocks=torch.empty(16, PRINTS.layout.block_bytes, device="meta"))
    with pytest.raises(ConfigError, match="ring"):
        KvSender(memory, PRINTS, ManualClock(), "tcp")


def test_unknown_transports_are_refused_by_name(make_pool):
    memory = make_pool().memory
    with pytest.raises(ConfigError, match=r"transport: 'carrier'"):
        KvSender(memory, PRINTS, ManualClock(), "carrier")
    with pytest.raises(ConfigError, match=r"transport: 'pigeon'"):
        KvReceiver(memory, PRINTS, ManualClock(), ("tcp", "pigeon"), "127.0.0.1")


async def test_shm_needs_a_pool_in_shared_memory(make_pool):
    memory = dataclasses.replace(make_pool().memory, shared_fd=None)
    receiver = KvReceiver(memory, PRINTS, ManualClock(), ("tcp", "shm"), "127.0.0.1")
    with pytest.raises(ConfigError, match="shm needs a pool in shared memory"):
        await receiver.start()
    await receiver.stop()


async def test_an_address_that_cannot_be_listened_on_is_named(make_pool):
    receiver = KvReceiver(make_pool().memory, PRINTS, ManualClock(), ("tcp",), "203.0.113.7")
    with pytest.raises(ConfigError, match=r"--listen: cannot listen on '203\.0\.113\.7'"):
        await receiver.start()
    await receiver.stop()


def test_a_misshapen_pool_is_our_own_bug(make_pool):
    memory = make_pool().memory
    for blocks in (memory.blocks.view(torch.int8), memory.blocks[:, :128], memory.blocks.view(32, 128)):
        with pytest.raises(InternalError):
            KvSender(dataclasses.replace(memory, blocks=blocks), PRINTS, ManualClock(), "tcp")


async def test_kv_is_received_at_the_port_asked_for(make_pool):
    (port,) = free_ports(1)
    receiver = KvReceiver(make_pool().memory, PRINTS, ManualClock(), ("tcp",), "127.0.0.1", listen_port=port)
    await receiver.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await receiver.stop()
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


def test_a_fixed_port_is_free_for_the_next_life_while_old_connections_linger():
    with tcp.listen("127.0.0.1") as first:
        port = first.getsockname()[1]
        peer = socket.create_connection(("127.0.0.1", port))
        first.setblocking(True)
        accepted, _ = first.accept()
        accepted.close()  # this side closes first: the address is in use for a minute more
        assert peer.recv(1) == b""
        peer.close()
    with tcp.listen("127.0.0.1", port) as second:
        assert second.getsockname()[1] == port


def test_a_port_in_use_is_named():
    with tcp.listen("127.0.0.1") as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--kv-port: cannot listen on '127\.0\.0\.1', port {port}"):
            tcp.listen("127.0.0.1", port)
