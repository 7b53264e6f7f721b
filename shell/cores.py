"""Plans which cores, how many threads and what priority each worker of `tandem serve` gets.

Measured on two cores, decoding beside an endless prefill (inter-token p99): one core each,
pinned, 17 ms; both with two threads 952 ms, since OpenMP threads spin at barriers for peers that
the other process keeps off the core; the same with prefill at nice 5, 29 ms; at nice 19 prefill
starves. Hence: no more threads than cores of one's own, and a mild nice only where cores must be shared.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

SHARED_PREFILL_NICE = 5


@dataclass(frozen=True, slots=True)
class CoreShare:
    """Cores of a worker."""

    cores: tuple[int, ...]
    """Cores that the worker may run on."""
    threads: int
    """Threads of its engine."""
    nice: int = 0


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Shares of the workers, in order."""

    prefill: tuple[CoreShare, ...]
    decode: tuple[CoreShare, ...]


def usable_cores() -> tuple[int, ...]:
    """Returns the cores that this process may run on; everything below is pure."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def plan_cores(cores: Sequence[int], num_prefill: int, num_decode: int, threads: int | None) -> CorePlan:
    """Splits `cores` (at least one) in their order among the workers; `threads` per worker overrides the split's size.

    Enough cores: disjoint shares, prefill workers get the remainder since computing prompts
    scales with cores where decoding waits for memory. Too few: one thread each, cores dealt
    round (decode workers first), or no pinning at all if `threads` asks for more than fits.
    """
    num_workers = num_prefill + num_decode
    if threads is not None and num_workers > 1 and threads * num_workers > len(cores):
        yielding = CoreShare(tuple(cores), threads, SHARED_PREFILL_NICE)
        return CorePlan((yielding,) * num_prefill, (CoreShare(tuple(cores), threads),) * num_decode)
    if num_workers > len(cores):
        return _dealt(cores, num_prefill, num_decode)
    return _disjoint(cores, num_prefill, num_decode, threads)


def share_all_cores(cores: Sequence[int], num_prefill: int, num_decode: int, threads: int | None) -> CorePlan:
    """Returns the shares of workers that compute on GPUs: all cores, without pinning and without nice."""
    own = CoreShare(tuple(cores), threads or max(1, len(cores) // (num_prefill + num_decode)))
    return CorePlan((own,) * num_prefill, (own,) * num_decode)


def _disjoint(cores: Sequence[int], num_prefill: int, num_decode: int, threads: int | None) -> CorePlan:
    share, remainder = divmod(len(cores), num_prefill + num_decode)
    left = iter(cores)
    num_workers = num_prefill + num_decode
    own = [tuple(islice(left, share + (1 if worker < remainder else 0))) for worker in range(num_workers)]
    plan = [CoreShare(cores, threads or len(cores)) for cores in own]
    return CorePlan(tuple(plan[:num_prefill]), tuple(plan[num_prefill:]))


def _dealt(cores: Sequence[int], num_prefill: int, num_decode: int) -> CorePlan:
    dealt = [cores[worker % len(cores)] for worker in range(num_decode + num_prefill)]
    decode_cores, prefill_cores = dealt[:num_decode], dealt[num_decode:]
    return CorePlan(
        tuple(CoreShare((core,), 1, SHARED_PREFILL_NICE if core in decode_cores else 0) for core in prefill_cores),
        tuple(CoreShare((core,), 1) for core in decode_cores),
    )
