"""Guests of the native kernels' team: they compute on cores of others while these do not, and change no result."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from bench.support.checkpoints import PEER_SHAPES, write_checkpoint
from engine.batch import build_batch
from engine.draws import SampleSpec
from engine.kv_cache import KvCache
from engine.step import ScheduledSeq
from kernels import cpu
from kernels.compiled_step import StepInputs
from kernels.cpu.core_loans import ENTRY_BYTES, CoreLedger, CoreLoan
from kernels.cpu.library import Library, max_threads, take_threads
from kernels.cpu.row_max import RowMax
from models.loading import load_model
from tandem.types import SamplingParams, TokenId

CORES = sorted(os.sched_getaffinity(0))
PATIENCE_S = 30.0
GREEDY = SampleSpec(SamplingParams(max_tokens=1, temperature=0.0), output_index=0)
pytestmark = [pytest.mark.native, pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")]


class Entry(ctypes.Structure):
    """TandemCoreUse of `guests.h`."""

    _fields_ = (("is_busy", ctypes.c_uint32), ("visit", ctypes.c_uint32), ("busy_until_ns", ctypes.c_int64))


@contextmanager
def borrower(ledger: str) -> Iterator[ThreadPoolExecutor]:
    """A thread on the first core that borrows the second one."""

    def settle() -> None:
        os.sched_setaffinity(0, {CORES[0]})
        torch.set_num_threads(1)
        take_threads(CoreLoan(ledger, (CORES[1],)))

    with ThreadPoolExecutor(1) as executor:
        executor.submit(settle).result()
        yield executor


@pytest.fixture
def ledger() -> Iterator[CoreLedger]:
    """Of all cores."""
    ledger = CoreLedger(CORES)
    yield ledger
    ledger.close()


@pytest.fixture
def entries(ledger: CoreLedger) -> list[Entry]:
    """What the ledger says, by core."""
    with open(ledger.path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)  # unmapped with the last entry
    return [Entry.from_buffer(memory, core * ENTRY_BYTES) for core in range(max(CORES) + 1)]


def _guests() -> list[Path]:
    found = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            if path.read_text() == "tandem-guest\n":
                found.append(path.parent)
    return found


def _comes_true(condition: Callable[[], bool]) -> bool:
    """Whether it does before patience ends: on a busy machine a guest, or who looks for it, may miss many a job."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.001)
    return True


def _guest_ran_ns() -> int:
    """Its processor time, once it sleeps: until then it is on its way out of the last job."""
    assert _comes_true(lambda: [_state(guest) for guest in _guests()] == ["S"])
    (guest,) = _guests()
    return int((guest / "schedstat").read_text().split()[0])


def _state(thread: Path) -> str:
    with suppress(OSError):  # it has ended meanwhile
        return (thread / "stat").read_text().rsplit(")", 1)[1].split()[0]
    return ""


ROWS = torch.randn(4000, 2000, generator=torch.Generator().manual_seed(0))
EXPECTED = ROWS.argmax(1).tolist()


def _work() -> None:
    row_max = RowMax(Library())
    for _ in range(20):
        assert row_max(ROWS).tolist() == EXPECTED


def test_a_guest_computes_on_a_core_that_nobody_uses(ledger):
    with borrower(ledger.path) as executor:
        executor.submit(_work).result()
        before_ns = _guest_ran_ns()

        def has_computed() -> bool:
            executor.submit(_work).result()
            return _guest_ran_ns() - before_ns > 1_000_000

        assert _comes_true(has_computed)
    assert _comes_true(lambda: not _guests())  # a thread that was joined is gone from /proc a little late


def test_a_guest_stays_away_from_a_core_that_computes(ledger, entries):
    with borrower(ledger.path) as executor:
        executor.submit(_work).result()
        entries[CORES[1]].is_busy = 1
        executor.submit(_work).result()
        before_ns = _guest_ran_ns()
        executor.submit(_work).result()
        assert _guest_ran_ns() == before_ns


def test_a_guest_does_not_come_between_two_steps_of_the_owner(ledger, entries):
    """A core counts as free only a while after its owner's last job."""
    with borrower(ledger.path) as executor:
        executor.submit(_work).result()
        entries[CORES[1]].busy_until_ns = time.monotonic_ns() + 10**12
        executor.submit(_work).result()
        before_ns = _guest_ran_ns()
        executor.submit(_work).result()
        assert _guest_ran_ns() == before_ns


def _seen_during_work(executor: ThreadPoolExecutor, value: Callable[[], int], wanted: set[int]) -> set[int]:
    """Work goes on until all that is wanted was seen."""
    seen: set[int] = set()

    def is_complete() -> bool:
        work = executor.submit(_work)
        while not work.done():
            seen.add(value())
        work.result()
        return wanted <= seen

    assert _comes_true(is_complete), seen
    return seen


def test_who_computes_says_so_for_its_own_cores(ledger, entries):
    with borrower(ledger.path) as executor:
        assert _seen_during_work(executor, lambda: entries[CORES[0]].is_busy, {0, 1}) == {0, 1}
        assert entries[CORES[0]].is_busy == 0
        assert 0 < entries[CORES[0]].busy_until_ns <= time.monotonic_ns()
        assert (entries[CORES[1]].is_busy, entries[CORES[1]].busy_until_ns) == (0, 0)


def test_a_guest_says_that_it_is_there(ledger, entries):
    with borrower(ledger.path) as executor:
        assert _seen_during_work(executor, lambda: entries[CORES[1]].visit, {0, 1}) == {0, 1}
    assert entries[CORES[1]].visit == 0


def test_an_owner_waits_for_a_guest_to_leave(ledger, entries):
    """It says so for some milliseconds of its next job, which one look may miss."""
    awaited, is_over = 2, 0

    def visit() -> int:
        seen = entries[CORES[0]].visit
        if seen == is_over:
            entries[CORES[0]].visit = 1
        return seen

    with borrower(ledger.path) as executor:
        _seen_during_work(executor, visit, {awaited})


def test_an_owner_does_not_wait_for_a_guest_that_has_died(ledger, entries):
    """It waits once, and clears what that left."""
    with borrower(ledger.path) as executor:
        entries[CORES[0]].visit = 1
        executor.submit(_work).result()
        assert entries[CORES[0]].visit == 0


def test_who_takes_over_a_core_clears_what_a_killed_worker_left(ledger, entries):
    entries[CORES[0]].is_busy = 1
    with borrower(ledger.path):
        assert entries[CORES[0]].is_busy == 0


@contextmanager
def _called_back_at_random(entry: Entry) -> Iterator[None]:
    """The core's owner computes now and then."""
    ended, rng = threading.Event(), random.Random(0)

    def toggle() -> None:
        while not ended.wait(rng.uniform(0, 0.002)):
            entry.is_busy = rng.randrange(2)

    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_guests_that_come_and_go_change_no_result(ledger, entries):
    with borrower(ledger.path) as executor, _called_back_at_random(entries[CORES[1]]):
        executor.submit(_work).result()
        assert _guest_ran_ns() > 0


def test_guests_that_come_and_go_change_no_bit_of_a_step(ledger, entries, tmp_path):
    """What a guest holds when it is called back, the owner may compute again."""
    write_checkpoint(PEER_SHAPES["smoke"], tmp_path)
    device, block_size, context = torch.device("cpu"), 16, 40
    model = load_model(tmp_path, "bfloat16", device, cpu.load())
    kv_cache = KvCache.create(model.kv_layout(block_size), 3 * 8, device)
    seqs = [ScheduledSeq((TokenId(seq),), context, range(3 * seq, 3 * seq + 3), (GREEDY,)) for seq in range(8)]
    batch = build_batch(seqs, block_size, device)

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            inputs = StepInputs(batch.token_ids, batch.positions, kv_cache.tensor, batch.metadata, batch.sample_rows)
            return model.decoder.forward(inputs)

    kv_cache.tensor.normal_()
    expected = logits()
    with borrower(ledger.path) as executor, _called_back_at_random(entries[CORES[1]]):
        assert executor.submit(lambda: all(torch.equal(logits(), expected) for _ in range(500))).result()
        assert _guest_ran_ns() > 0
    kv_cache.close()


@pytest.mark.parametrize("cores", [(CORES[1],), (10_000,)])
def test_where_a_ledger_cannot_be_used_the_own_cores_compute_alone(ledger, cores):
    """It is not there, or has no entries of the cores."""
    path = ledger.path if cores == (10_000,) else "/nowhere"

    def work_alone() -> None:
        torch.set_num_threads(1)
        take_threads(CoreLoan(path, cores))
        assert max_threads() == 1
        _work()

    with ThreadPoolExecutor(1) as executor:
        executor.submit(work_alone).result()
