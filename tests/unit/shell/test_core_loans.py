from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from shell.core_loans import ENTRY_BYTES, CoreLedger, CoreLoan


def test_a_loan_is_read_as_it_is_written() -> None:
    loan = CoreLoan("/proc/1/fd/3", (1, 12))
    assert CoreLoan.of_text(str(loan)) == loan


@pytest.mark.parametrize("text", ["", "1,2", "/path:", "/path:1,", "/path:one", ":1"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PATH:1,2"):
        CoreLoan.of_text(text)


@pytest.mark.skipif(sys.platform != "linux", reason="memory files")
def test_a_ledger_has_an_empty_entry_for_each_core_and_ends_with_its_owner() -> None:
    ledger = CoreLedger((2, 5))
    assert Path(ledger.path).read_bytes() == bytes(6 * ENTRY_BYTES)
    ledger.occupy((5,))
    assert Path(ledger.path).read_bytes()[5 * ENTRY_BYTES :] == (1).to_bytes(4, sys.byteorder) + bytes(ENTRY_BYTES - 4)
    path = ledger.path
    ledger.close()
    assert not Path(path).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="processes bound to cores")
def test_only_two_that_lend_each_other_all_their_cores_are_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def group(own: set[int], others: tuple[int, ...], ledger: str = "/proc/1/fd/3") -> str:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: own)
        return CoreLoan(ledger, others).group()

    assert group({0, 1}, (2, 3)) == group({2, 3}, (0, 1))
    assert group({0}, (1,)) != group({1}, (0,), "/proc/2/fd/3")
    assert len({group({0}, (2,)), group({1}, (0,)), group({2}, (1,))}) == 3, "a ring"
