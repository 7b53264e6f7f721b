"""Processes that are the ranks of tiny models: forked of a server that has imported torch, used by test after test."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
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
from tests.paged_driver import CPU, REFERENCE, PagedDriver, logits_of

JOIN_S, WAIT_S = 60.0, 30.0
"""Long, as other tests compute beside these; `Ranks.open` takes shorter waits where one is to run out."""

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
    group: Group | None, folder: Path, kernels: str, dtype: str, form: QuantForm | None = None
) -> list[list[float]]:
    """Logits of each token of a prompt; floats, which hold those of every dtype."""
    rows: list[list[float]] = logits_of(load_part(group, folder, kernels, dtype, form)).tolist()
    return rows


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
        for end in self._ends:
            end.send((job, arguments))

    def take(self) -> list[Any]:
        """The result of each rank, or the exception; EOFError of one that ended."""
        return [self._take(end) for end in self._ends]

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


def steps_job(group, folder, dtype, form, length):
    from tests.paged_driver import PagedSeq, random_prompt
    model=load_part(group,folder,"cpu",dtype,form)
    d=PagedDriver(model,16,2*(2+length//16)); out=[]
    a=PagedSeq(random_prompt(length)); b=PagedSeq(random_prompt(length,5))
    out+=d.step([(a,length-3),(b,length//2)])[[0,-1]].tolist()
    for _ in range(3): out+=d.step([(a,1),(b,1)]).tolist()
    return out
