"""Processes that are the ranks of tiny models: forked of a server that has imported torch, used by test after test."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kernels.dispatch import select_kernels
from kernels.group import Group
from kernels.quantized import QuantForm
from kernels.shared_group import SharedGroup, create_group_memory
from models.loading import LoadedModel, load_model
from tests.paged_driver import CPU, REFERENCE, PagedDriver, PagedSeq, random_prompt

JOIN_S, WAIT_S = 60.0, 30.0
"""Long, as other tests compute beside these; a test in which one is to run out has a shorter one."""

Job = Callable[..., Any]
"""Called on each rank with its group and the test's arguments; a function of a module."""


def load_part(
    group: Group | None, folder: Path, kernels: str, dtype: str, form: QuantForm | None = None
) -> LoadedModel:
    chosen = REFERENCE if kernels == "reference" else select_kernels(kernels, CPU, getattr(torch, dtype))
    return load_model(folder, dtype, CPU, chosen, form, group=group)


def greedy_tokens(
    group: Group | None, folder: Path, kernels: str, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Of each prompt, in chunks and batches, in float32."""
    driver = PagedDriver(load_part(group, folder, kernels, "float32"), 16, 40)
    return driver.generate(prompts, max_tokens, chunk_tokens=24)


def rows_of_logits(
    group: Group | None, folder: Path, kernels: str, dtype: str, form: QuantForm | None = None, length: int = 40
) -> list[list[float]]:
    """Logits of a prompt that is computed in two steps, the second of which decodes another one; as floats."""
    driver = PagedDriver(load_part(group, folder, kernels, dtype, form), 16, 4 + length // 8)
    long, short = PagedSeq(random_prompt(length)), PagedSeq(random_prompt(length // 2, seed=1))
    steps = [[(long, length - 2), (short, length // 2 - 2)], [(short, 1), (long, 1)], [(long, 1), (short, 1)]]
    rows: list[list[float]] = torch.cat([driver.step(step)[[0, -1]] for step in steps]).tolist()
    return rows


def exchanged(group: Group, num_elements: int, times: int) -> tuple[list[float], list[float], list[float]]:
    """A sum, gathered columns and a broadcast of what tells ranks and turns apart; the last of `times` turns."""
    widths = [1 + rank for rank in range(group.size)]
    for turn in range(times):
        own = torch.arange(num_elements, dtype=torch.float32) + turn * 1000.0 ** (group.rank - 1)
        total = group.all_reduce(own)
        gathered = group.all_gather(torch.full((2, widths[group.rank]), turn + group.rank), widths)
        said = group.broadcast(torch.full((3,), group.rank + turn))
    return total[-2:].tolist(), gathered.tolist(), said.tolist()


def meet(group: Group) -> None:
    group.broadcast(torch.zeros(1))


def meet_or_fail(group: Group, fails: int) -> None:
    """Rank `fails` gives up instead of meeting the others."""
    if group.rank == fails:
        assert isinstance(group, SharedGroup)
        group.abort()
        raise ValueError("no")
    meet(group)


class Ranks:
    """The processes of one group; jobs are given to all of them, and their results taken in the order of ranks."""

    def __init__(self, size: int, join_s: float = JOIN_S, wait_s: float = WAIT_S) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.ranks"])
        descriptor = create_group_memory(size)
        self.processes: list[Any] = []
        self._ends: list[Connection] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            waits = (join_s, wait_s)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            self.processes.append(context.Process(target=_serve, args=(path, rank, size, waits, theirs), daemon=True))
            self._ends.append(ours)
            self.processes[-1].start()
            theirs.close()
        assert [self._take(end) for end in self._ends] == [None] * size  # all have joined
        os.close(descriptor)

    def give(self, job: Job, *arguments: object) -> None:
        self.give_to(range(len(self._ends)), job, *arguments)

    def give_to(self, ranks: Iterable[int], job: Job, *arguments: object) -> None:
        for rank in ranks:
            self._ends[rank].send((job, arguments))

    def take(self) -> list[Any]:
        """The result of each rank, or the exception; EOFError of one that ended."""
        return self.take_from(range(len(self._ends)))

    def take_from(self, ranks: Iterable[int]) -> list[Any]:
        return [self._take(self._ends[rank]) for rank in ranks]

    def run(self, job: Job, *arguments: object) -> Any:
        """The result of `job`, the same on all ranks."""
        self.give(job, *arguments)
        first, *others = self.take()
        if isinstance(first, Exception):
            raise first
        assert all(other == first for other in others)
        return first

    def close(self) -> None:
        for process, end in zip(self.processes, self._ends, strict=True):
            end.close()
            process.kill()
            process.join()
            process.close()

    @staticmethod
    def _take(end: Connection) -> Any:
        try:
            return end.recv() if end.poll(100.0) else TimeoutError()
        except (EOFError, ConnectionResetError):
            return EOFError()


@contextmanager
def ranks_of(size: int, **waits: float) -> Iterator[Ranks]:
    ranks = Ranks(size, **waits)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(path: str, rank: int, size: int, waits: tuple[float, float], end: Connection) -> None:
    torch.set_num_threads(1)  # ranks share the cores
    descriptor = os.open(path, os.O_RDWR)
    group = SharedGroup(descriptor, rank, size, *waits)
    os.close(descriptor)
    end.send(None)
    while True:
        try:
            job, arguments = end.recv()
        except EOFError:
            return
        try:
            with torch.no_grad():
                end.send(job(group, *arguments))
        except Exception as error:  # noqa: BLE001 - the test tells
            end.send(RuntimeError(f"{type(error).__name__}: {error}"))
