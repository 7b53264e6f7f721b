"""The followers of a model whose ranks share it, as rank 0 sees them: one process each (`engine.follower`).

    start → each rank loads its shard → create_pools → send, step after step → close

Followers are children of the engine's thread, and the kernel kills them when it ends. One that ends, fails, or does not
answer breaks the group; no rank is replaced alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from typing import Any, Final, TypeAlias

import torch

from engine.kv_cache import KvCache
from engine.rank_link import LEAST_TIMEOUT_S, RankStep, StepSender, StepSlots, in_step
from engine.upload import Array
from kernels.shared_group import SharedGroup, create_group_memory
from models.files.checkpoint import resolve_model
from models.shard import OPTION, check_shared
from shell.config import WorkerConfig
from shell.core_order import neighbouring_cores
from shell.cores import CoreShare, plan_cores
from shell.module_command import module_command
from tandem.decision import Decision
from tandem.errors import CheckpointError, ConfigError, InternalError
from tandem.kv_layout import KvLayout

JOIN_TIMEOUT_S = 60.0
"""Ranks join once all have started."""

_Link: TypeAlias = "Connection[Any, Any]"


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a follower is started for."""

    config: WorkerConfig
    rank: int
    share: CoreShare
    timeout_s: float
    """How long other ranks may stand still, until steps show otherwise."""


class Ranks:
    """Made by `start`, on the thread that computes; `close` ends the followers."""

    def __init__(
        self, group: SharedGroup, slots: StepSlots, processes: Sequence[subprocess.Popen[bytes]], links: Sequence[_Link]
    ) -> None:
        """Takes over every argument; processes and links are those of ranks 1, 2, …"""
        self.group: Final = group
        """The group, of which this process is rank 0."""
        self.parts: tuple[KvCache, ...] = ()
        """The followers' parts of the pool, by rank from 1 on, mapped here too; owned here."""
        self.ends = [os.pidfd_open(process.pid) for process in processes]
        """Descriptors that become readable when a follower ends; owned here."""
        self._processes = processes
        self._links = links
        self._sender = StepSender(slots, links, group)

    @classmethod
    def start(cls, config: WorkerConfig, shares: Sequence[CoreShare]) -> Ranks:
        """Starts the followers, on `shares` of the cores; returns once they have joined. Raises InternalError."""
        slots, memory = StepSlots.create(), create_group_memory(len(shares))
        processes: list[subprocess.Popen[bytes]] = []
        links: list[_Link] = []
        try:
            for rank, share in enumerate(shares[1:], 1):
                link, theirs = Pipe()
                with theirs:
                    processes.append(_start(theirs.fileno(), slots, memory))
                links.append(link)
                _tell(rank, link, RankTask(config, rank, share, LEAST_TIMEOUT_S))
            _hear(links, processes)
            group = SharedGroup(memory, 0, len(shares), JOIN_TIMEOUT_S, LEAST_TIMEOUT_S)
            return cls(group, StepSlots(slots), processes, links)
        except BaseException:
            _end(processes)
            raise
        finally:
            os.close(slots)
            os.close(memory)

    @property
    def pids(self) -> tuple[int, ...]:
        """Returns the followers' process ids."""
        return tuple(process.pid for process in self._processes)

    def create_pools(self, own: KvCache, fingerprint: str) -> None:
        """Gives each follower a part as large as rank 0's `own`, once it has loaded the model with this `fingerprint`.

        The follower has the layout first, then the descriptor of the memory file. Raises InternalError, ConfigError,
        CheckpointError.
        """
        for rank, found in enumerate(_hear(self._links, self._processes), 1):
            if found.decode() != fingerprint:  # the files were replaced between two ranks' starts
                raise CheckpointError(f"rank {rank} loaded another model than rank 0: start again once all is written")
        for rank, (process, link) in enumerate(zip(self._processes, self._links, strict=True), 1):
            part = KvCache.create(own.layout, own.num_blocks, torch.device("cpu"), shared=True)
            self.parts = (*self.parts, part)
            _tell(rank, link, own.layout)
            assert part.shared_fd is not None
            send_handle(link, part.shared_fd, process.pid)
        _hear(self._links, self._processes)

    def find_stopped(self) -> int | None:
        """Returns the first rank that a signal has stopped and none has continued; None if there is none."""
        return next((rank for rank, process in enumerate(self._processes, 1) if _is_stopped(process)), None)

    @contextmanager
    def in_step(self, step: RankStep[Array]) -> Iterator[None]:
        """Sends `step`, which this rank computes within, as the others do. Raises GroupBroken."""
        with in_step(self.group):
            self._sender.send(step)
            yield

    def close(self) -> None:
        """Ends the followers, and gives their parts back. Idempotent."""
        self.group.close()
        _end(self._processes)
        for link in self._links:
            link.close()
        for part in self.parts:
            part.close()
        while self.ends:
            os.close(self.ends.pop())


def check_ranks(config: WorkerConfig, device: torch.device) -> None:
    """Raises ConfigError for what several ranks cannot do, CheckpointError."""
    if config.tensor_parallel is None:
        return
    if device.type != "cpu" or sys.platform != "linux":
        raise ConfigError(OPTION, "ranks compute on CPUs of Linux alone: give --device cpu, or leave this option out")
    for option, value in (("--host-cache-memory", config.host_cache_bytes), ("--disk-cache", config.disk_cache)):
        if value and config.num_ranks > 1:
            raise ConfigError(OPTION, f"several ranks do not move KV to {option}: leave that out, or give 1")
    check_shared(resolve_model(config.model), config.model_impl, config.tensor_parallel)


def shares_of(config: WorkerConfig) -> tuple[CoreShare, ...]:
    """Deals the cores of this process among the ranks, neighbours to the same one."""
    size, threads = config.num_ranks, config.threads
    return plan_cores(neighbouring_cores(), 0, size, None if threads is None else max(1, threads // size)).decode


def ranks_decision(shares: Sequence[CoreShare], part: KvLayout, num_blocks: int) -> Decision | None:
    """Returns how the model is shared; None for a model of one process."""
    if len(shares) == 1:
        return None
    cores = "; ".join(",".join(map(str, share.cores)) for share in shares)
    value = f"{len(shares)}, each with {num_blocks * part.block_bytes} bytes of KV and {shares[0].threads} threads"
    return Decision("ranks", value, f"{OPTION} says so; their cores: {cores}", OPTION)


def _start(link: int, slots: int, memory: int) -> subprocess.Popen[bytes]:
    descriptors = (link, slots, memory)
    command = module_command("engine.rank", *map(str, (os.getpid(), *descriptors)))
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=descriptors)


def _tell(rank: int, link: _Link, what: RankTask | KvLayout) -> None:
    try:
        link.send(what)
    except OSError as error:
        raise _ended(rank) from error


def _hear(links: Sequence[_Link], processes: Sequence[subprocess.Popen[bytes]]) -> list[bytes]:
    """Returns what each follower says once it has done what comes next, however long that takes.

    Raises InternalError for one that ended, or stands still.
    """
    said = []
    for rank, (link, process) in enumerate(zip(links, processes, strict=True), 1):
        try:
            num_stopped = 0
            while num_stopped < 2 and not link.poll(LEAST_TIMEOUT_S / 2):
                num_stopped = num_stopped + 1 if _is_stopped(process) else 0
            if num_stopped == 2:
                raise InternalError(f"rank {rank} stands still, stopped by a signal")
            said.append(link.recv_bytes())
        except (EOFError, OSError) as error:
            raise _ended(rank) from error
    return said


def _ended(rank: int) -> InternalError:
    return InternalError(f"rank {rank} ended before it could compute; its log says why")


def _is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Returns whether a signal has stopped the child, and no later one has continued the child."""
    return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
