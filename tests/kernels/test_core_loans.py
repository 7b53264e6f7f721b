from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kernels.cpu.core_loans import ENTRY_BYTES, CoreLedger, CoreLoan
from shell.config import lend_cores


def test_a_process_reads_the_loan_that_it_was_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert CoreLoan.of_process() is None
    loan = CoreLoan("/proc/1/fd/3", (1, 12))
    lend_cores(str(loan))
    assert CoreLoan.of_process() == loan


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
