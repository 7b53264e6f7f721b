"""How fast blocks go from one process to another: `python -m bench.transfer`.

A receiving process of its own, a sending pool here; per transport and block size, hand-offs of
a fixed number of bytes are repeated and the fastest and the median are reported, with
checksums on, from the first push to COMMITTED. With `--tls DIR`, tcp is inside mutual TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from kvtransfer.base import BlockRef, Fingerprints, PoolMemory
from kvtransfer.receiver import KvReceiver
from kvtransfer.sender import KvSender
from kvtransfer.transports import TCP, usable
from tandem.clock import MonotonicClock
from tandem.errors import TransferError
from tandem.kv_layout import DType, KvLayout
from tandem.security.tls import ClientTls, ServerTls
from tandem.types import BlockId, new_incarnation

MIB = 1024 * 1024
_EXPIRES_IN_S = 60.0
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One transport at one block size."""

    transport: str
    block_bytes: int
    num_blocks: int
    num_bytes: int
    median_s: float
    best_s: float
    median_gb_per_s: float
    best_gb_per_s: float


class _Quiet:
    """A listener with nothing to do: the sender sees the end."""

    def on_receiving(self) -> None: ...

    def on_committed(self, first_token_payload: bytes) -> None: ...

    def on_failed(self, error: TransferError) -> None: ...

    def on_writer_stopped(self) -> None: ...


def _prints(block_bytes: int) -> Fingerprints:
    return Fingerprints("bench", KvLayout(1, 1, block_bytes // 128, 32, DType.BFLOAT16))


@contextmanager
def _memory(num_blocks: int, block_bytes: int) -> Iterator[PoolMemory]:
    fd = os.memfd_create("tandem-bench")
    os.ftruncate(fd, num_blocks * block_bytes)
    mapping = mmap.mmap(fd, num_blocks * block_bytes)
    blocks = torch.frombuffer(mapping, dtype=torch.uint8).view(num_blocks, block_bytes)
    blocks.fill_(1)  # every page is there before the clock runs
    try:
        yield PoolMemory(blocks, fd, new_incarnation())
    finally:
        os.close(fd)  # the mapping goes with its last tensor


@dataclass(frozen=True, slots=True)
class _Tls:
    """A folder with ca.crt, tls.crt and tls.key, as docs/security.md makes them."""

    folder: Path

    def _file(self, name: str) -> str:
        return str(self.folder / name)

    def server(self) -> ServerTls:
        return ServerTls(self._file("tls.crt"), self._file("tls.key"), self._file("ca.crt"))

    def client(self) -> ClientTls:
        return ClientTls(self._file("ca.crt"), self._file("tls.crt"), self._file("tls.key"))


def _receive(pipe: Connection, transport: str, num_blocks: int, block_bytes: int, tls: _Tls | None) -> None:
    """The other process: one offer for every request on the pipe, until it says None."""
    with _memory(num_blocks, block_bytes) as memory:
        asyncio.run(_serve_offers(pipe, memory, transport, block_bytes, tls))


async def _serve_offers(
    pipe: Connection, memory: PoolMemory, transport: str, block_bytes: int, tls: _Tls | None
) -> None:
    server_tls = None if tls is None else tls.server()
    receiver = KvReceiver(memory, _prints(block_bytes), MonotonicClock(), (transport,), "127.0.0.1", tls=server_tls)
    await receiver.start()
    loop = asyncio.get_running_loop()
    blocks = tuple(BlockRef(BlockId(i), 0) for i in range(memory.blocks.shape[0]))
    while await loop.run_in_executor(None, pipe.recv):
        offer = receiver.offer(blocks, _Quiet(), _EXPIRES_IN_S)
        pipe.send((offer.ticket, offer.endpoint))
    await receiver.stop()


async def _send(
    pipe: Connection, transport: str, memory: PoolMemory, block_bytes: int, repeats: int, tls: _Tls | None
) -> list[float]:
    """Seconds of each hand-off after the first, which maps and warms up."""
    client_tls = None if tls is None else tls.client()
    sender = KvSender(memory, _prints(block_bytes), MonotonicClock(), transport, tls=client_tls)
    sources = tuple(BlockId(i) for i in range(memory.blocks.shape[0]))
    loop = asyncio.get_running_loop()
    seconds: list[float] = []
    for _ in range(repeats + 1):
        pipe.send(True)
        ticket, endpoint = await loop.run_in_executor(None, pipe.recv)
        handoff = await sender.open(ticket, endpoint, _TIMEOUT_S)
        started_s = time.perf_counter()
        await handoff.push(0, sources)
        await handoff.commit(b"")
        seconds.append(time.perf_counter() - started_s)
    pipe.send(False)
    await sender.stop()
    return seconds[1:]


def measure(transport: str, block_bytes: int, num_bytes: int, repeats: int, tls: _Tls | None = None) -> Measurement:
    """Repeats a hand-off of `num_bytes` in whole blocks between two processes."""
    num_blocks = max(1, num_bytes // block_bytes)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=_receive, args=(theirs, transport, num_blocks, block_bytes, tls), daemon=True)
    receiver.start()
    theirs.close()
    with _memory(num_blocks, block_bytes) as memory:
        seconds = asyncio.run(_send(ours, transport, memory, block_bytes, repeats, tls))
    receiver.join(_TIMEOUT_S)
    total, median_s, best_s = num_blocks * block_bytes, statistics.median(seconds), min(seconds)
    gb = total / 1e9
    name = f"{transport}+tls" if tls is not None and transport == TCP else transport
    return Measurement(name, block_bytes, num_blocks, total, median_s, best_s, gb / median_s, gb / best_s)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description=__doc__)
    parser.add_argument("--device", default="cpu", help="where the pools lie: cpu or cuda")
    parser.add_argument("--transports", default="", help="comma-separated; default: all that work here")
    parser.add_argument("--block-kib", default="16,368,4096", help="block sizes in KiB, comma-separated")
    parser.add_argument("--mib", type=int, default=64, help="payload of one hand-off")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tls", type=Path, metavar="DIR", help="folder with ca.crt, tls.crt, tls.key for 127.0.0.1")
    parser.add_argument("--json", type=Path, help="write the result there instead of stdout")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Measures and reports; exit code 0 also where there is nothing to measure."""
    arguments = _arguments(argv)
    if arguments.device != "cpu":
        reason = (
            "no GPU" if not torch.cuda.is_available() else "transports move its mirror in host memory: see --device cpu"
        )
        print(f"not measured: {reason}")
        return 0
    transports = arguments.transports.split(",") if arguments.transports else usable(arguments.device)
    tls = None if arguments.tls is None else _Tls(arguments.tls)
    results = [
        measure(transport, int(kib) * 1024, arguments.mib * MIB, arguments.repeats, tls)
        for transport in transports
        for kib in arguments.block_kib.split(",")
    ]
    text = json.dumps({"device": arguments.device, "results": [asdict(result) for result in results]}, indent=2)
    if arguments.json is None:
        print(text)
        return 0
    arguments.json.write_text(text + "\n", encoding="utf-8")
    for result in results:
        print(f"{result.transport:7} {result.block_bytes // 1024:6} KiB blocks: {result.median_gb_per_s:6.2f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
