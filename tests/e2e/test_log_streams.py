"""A log that nobody takes costs its lines, never the service."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from bench.support.cluster import eventually, pid_of
from tandem.client import Client
from tandem.errors import InvalidRequest
from tandem.types import Role

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/dev/full and sizes of pipes are Linux's")
SMALL_PIPE_BYTES = 4096


@contextmanager
def command(*arguments: str, stderr: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A ready `tandem` command and its address; it is killed at the end if it has not ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cli.main", *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True
    )
    with process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().removeprefix("ready ").strip()
        finally:
            process.kill()


def serve(stderr: int) -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    return command("serve", "--prefill", "1", "--decode", "1", "--listen", "127.0.0.1:0", stderr=stderr)


@contextmanager
def full_disk() -> Iterator[int]:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@contextmanager
def reader_gone() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextmanager
def nobody_reads() -> Iterator[int]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, SMALL_PIPE_BYTES)  # type: ignore[attr-defined,unused-ignore]  # Linux's
    yield writer
    os.close(reader)
    os.close(writer)


@LINUX
@pytest.mark.parametrize("stderr", [full_disk, reader_gone])
def test_serve_keeps_its_children_though_their_lines_go_nowhere(stderr: type) -> None:
    with stderr() as descriptor, serve(descriptor) as (process, target):
        with Client(target) as client:
            client.wait_ready(timeout_s=30)
            killed = pid_of(client, Role.DECODE)
            os.kill(killed, signal.SIGKILL)
            assert eventually(lambda: killed not in {each.info.pid for each in client.status().workers}, 30)
            client.wait_ready(timeout_s=30)
            assert pid_of(client, Role.DECODE) != killed
            assert client.complete("Once", max_tokens=2).choices[0].token_ids
        assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=30) == 0


@LINUX
@pytest.mark.parametrize("arguments", [("serve",), ("router", "--model", "demo")])
def test_a_log_that_nobody_reads_stalls_neither_service_nor_sigterm(arguments: tuple[str, ...]) -> None:
    options = ("--listen", "127.0.0.1:0", "--log-level", "debug")
    with nobody_reads() as descriptor, command(*arguments, *options, stderr=descriptor) as (process, target):
        with Client(target) as client:
            for _ in range(100):
                client.status(timeout_s=10)
                with pytest.raises(InvalidRequest):
                    client.complete("Once", max_tokens=0, timeout_s=10)
        process.terminate()
        assert process.wait(timeout=30) == 0
