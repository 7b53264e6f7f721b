"""How fast blocks go from one process to another: `python -m bench.transfer`.

A receiving process of its own, a sending pool here. In each round, in turn: a hand-off of a fixed number of bytes per
transport and block size, with checksums on both sides, from `open` to COMMITTED over an open connection; the same bytes
by a plain copy and by a raw socket, without checksums; and what a hand-off costs that moves one block, or none. Ratios
are medians of the rounds' own ratios. With `--tls DIR`, tcp is inside mutual TLS.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop

from bench.support.machine import write_record
from bench.transfer_pair import CopyCeiling, DeviceCopyCeiling, Pair, SocketCeiling, Spec, Tls, pool_memory
from kvtransfer.transports import CUDA_IPC, NIXL, SHM, TCP, usable

MIB = 1024 * 1024
FIXED_PER_ROUND = 5
"""Hand-offs of one block, and of none, in each round."""
PLAIN_COPY = "plain copy"
RAW_SOCKET = "raw socket"
CEILINGS = {SHM: PLAIN_COPY, CUDA_IPC: PLAIN_COPY, TCP: RAW_SOCKET, NIXL: RAW_SOCKET}
"""What each transport is held against."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One transport, or one ceiling, at one block size; a ceiling has neither ratio nor fixed cost."""

    transport: str
    block_bytes: int
    num_bytes: int
    median_s: float
    best_s: float
    median_gb_per_s: float
    best_gb_per_s: float
    of_ceiling: float | None = None
    """Of the rate of its ceiling."""
    connect_ms: float | None = None
    """The first hand-off: dials, maps, and touches each page of the mapping for the first time."""
    one_block_ms: float | None = None
    empty_ms: float | None = None


def _measurement(name: str, block_bytes: int, num_bytes: int, seconds: Sequence[float], **more: Any) -> Measurement:
    median_s, best_s, gb = statistics.median(seconds), min(seconds), num_bytes / 1e9
    return Measurement(name, block_bytes, num_bytes, median_s, best_s, gb / median_s, gb / best_s, **more)


class _Size:
    """All that is measured at one block size."""

    def __init__(
        self,
        stack: ExitStack,
        transports: Sequence[str],
        block_bytes: int,
        num_bytes: int,
        tls: Tls | None,
        devices: tuple[str, str],
    ):
        num_blocks = max(1, num_bytes // block_bytes)
        specs = [Spec(each, block_bytes, num_blocks, tls if each == TCP else None, *devices) for each in transports]
        memory = stack.enter_context(pool_memory(specs[0]))
        self._num_bytes, self._block_bytes = num_blocks * block_bytes, block_bytes
        self._pairs = [Pair(spec, memory) for spec in specs]
        pool = memory.device
        self._copies = CopyCeiling(memory.blocks.numpy()) if pool is None else DeviceCopyCeiling(pool.blocks)
        self._socket = SocketCeiling(num_blocks * block_bytes)
        self._seconds: dict[str, list[float]] = {}
        self._connect_s: dict[str, float] = {}

    async def warm_up(self) -> None:
        """Connects, and whatever else happens once."""
        for pair in self._pairs:
            self._connect_s[pair.spec.transport] = await pair.hand_off(pair.spec.num_blocks)
        for ceiling in self._ceilings().values():
            ceiling()

    async def round(self) -> None:
        """Each once, in turn."""
        for pair in self._pairs:
            name = pair.spec.transport
            self._add(name, await pair.hand_off(pair.spec.num_blocks))
            for _ in range(FIXED_PER_ROUND):
                self._add(f"{name} one block", await pair.hand_off(1))
                self._add(f"{name} empty", await pair.hand_off(0))
        for name, ceiling in self._ceilings().items():
            self._add(name, ceiling())

    def _add(self, name: str, seconds: float) -> None:
        self._seconds.setdefault(name, []).append(seconds)

    async def stop(self) -> None:
        """Ends all other processes."""
        for pair in self._pairs:
            await pair.stop()
        self._socket.stop()

    def ceilings(self) -> list[Measurement]:
        """Of this size."""
        return [self._ceiling(name) for name in self._ceilings()]

    def _ceilings(self) -> dict[str, Callable[[], float]]:
        return {PLAIN_COPY: self._copies.move, RAW_SOCKET: self._socket.move}

    def _ceiling(self, name: str) -> Measurement:
        return _measurement(name, self._block_bytes, self._num_bytes, self._seconds[name])

    def _ratio(self, ceiling: str, name: str) -> float:
        pairs = zip(self._seconds[ceiling], self._seconds[name], strict=True)
        return statistics.median(least / took for least, took in pairs)

    def results(self) -> list[Measurement]:
        """Of this size, one per transport."""
        return [self._result(pair.spec) for pair in self._pairs]

    def _result(self, spec: Spec) -> Measurement:
        name = spec.transport
        ceiling = CEILINGS.get(name, "")
        ratio = None
        if ceiling in self._seconds and spec.tls is None:
            ratio = self._ratio(ceiling, name)
        return _measurement(
            f"{name}+tls" if spec.tls is not None else name,
            self._block_bytes,
            self._num_bytes,
            self._seconds[name],
            of_ceiling=ratio,
            connect_ms=self._connect_s[name] * 1e3,
            one_block_ms=statistics.median(self._seconds[f"{name} one block"]) * 1e3,
            empty_ms=statistics.median(self._seconds[f"{name} empty"]) * 1e3,
        )


async def measure(
    transports: Sequence[str],
    sizes: Sequence[int],
    num_bytes: int,
    rounds: int,
    tls: Tls | None = None,
    devices: tuple[str, str] = ("cpu", "cpu"),
) -> dict[str, Any]:
    """Hand-offs of `num_bytes` in blocks of each of `sizes` bytes, and the ceilings."""
    with ExitStack() as stack:
        measured = [_Size(stack, transports, block_bytes, num_bytes, tls, devices) for block_bytes in sizes]
        for size in measured:
            await size.warm_up()
        for _ in range(rounds):
            for size in measured:
                await size.round()
        for size in measured:
            await size.stop()
    return {
        "rounds": rounds,
        "ceilings": [asdict(each) for size in measured for each in size.ceilings()],
        "results": [asdict(each) for size in measured for each in size.results()],
    }


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description=__doc__)
    parser.add_argument("--device", default="cpu", help="where the pools lie: cpu or cuda (the first and the last GPU)")
    parser.add_argument("--transports", default="", help="comma-separated; default: all that work here")
    parser.add_argument("--block-kib", default="16,368,4096", help="block sizes in KiB, comma-separated")
    parser.add_argument("--mib", type=int, default=64, help="payload of one hand-off")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tls", type=Path, metavar="DIR", help="folder with ca.crt, tls.crt, tls.key for 127.0.0.1")
    parser.add_argument("--json", type=Path, help="write the result there instead of stdout")
    parser.add_argument("--record", action="store_true", help="write bench/results/transfer.json")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Measures and reports; exit code 0 also where there is nothing to measure."""
    arguments = _arguments(argv)
    devices = ("cpu", "cpu")
    if arguments.device != "cpu":
        if not torch.cuda.is_available():
            print("not measured: no GPU")
            return 0
        devices = ("cuda:0", f"cuda:{torch.cuda.device_count() - 1}")
    transports = arguments.transports.split(",") if arguments.transports else usable(arguments.device)
    tls = None if arguments.tls is None else Tls(arguments.tls)
    sizes = [int(kib) * 1024 for kib in arguments.block_kib.split(",")]
    results = uvloop.run(measure(transports, sizes, arguments.mib * MIB, arguments.rounds, tls, devices))
    if arguments.record:
        write_record("transfer", results)
    text = json.dumps({"device": arguments.device, **results}, indent=2)
    if arguments.json is None:
        print(text)
        return 0
    arguments.json.write_text(text + "\n", encoding="utf-8")
    for each in (*results["ceilings"], *results["results"]):
        ratio = "" if each["of_ceiling"] is None else f", {each['of_ceiling']:.2f} of the ceiling"
        print(f"{each['transport']:12} {each['block_bytes'] // 1024:6} KiB: {each['median_gb_per_s']:6.2f} GB/s{ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
