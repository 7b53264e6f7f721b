"""Offers whose blocks have a checksum for each grain, and lie in more places than that."""

from __future__ import annotations

import pytest

from kvtransfer.messages import Commit, Write, digest_of
from kvtransfer.offers import OfferTable
from kvtransfer.plan import Place
from tandem.errors import ChecksumMismatch
from tandem.types import Incarnation
from tests.kv_ends import FAILED, RECEIVED, Recorder, refs_of
from tests.manual_clock import ManualClock

PLACES = (Place(0, 0), Place(1, 0), Place(2, 1), Place(3, 1))
"""Four ranks that share two heads."""
WRITE = Write(0, (11, 12, 21, 22), num_grains=2)
FOUND = (11, 11, 12, 12, 21, 21, 22, 22)


class Stopped:
    """A writer that cannot write any more."""

    def stop_writing(self, number: int, error: object) -> bool:
        return True


@pytest.fixture
def table() -> OfferTable:
    return OfferTable(Incarnation("ab" * 16), "cd" * 16, 4, ManualClock())


@pytest.fixture
def number(table: OfferTable, recorder: Recorder) -> int:
    ticket = table.mint(refs_of((0, 1)), recorder, 5.0)
    table.show(ticket.number, ticket.encode(), Stopped(), PLACES)
    return ticket.number


def test_every_place_is_compared_with_its_grain(table: OfferTable, number: int, recorder: Recorder) -> None:
    assert table.claim(number, 0, WRITE) == (0, 1)
    assert table.verify(number, WRITE, FOUND)
    table.commit(number, Commit(1, digest_of([*WRITE.checksums]), b""))
    assert recorder.calls == RECEIVED


@pytest.mark.parametrize("at", range(len(FOUND)))
def test_a_place_that_differs_fails_the_offer_by_its_rank(
    table: OfferTable, number: int, recorder: Recorder, at: int
) -> None:
    found = [each + (i == at) for i, each in enumerate(FOUND)]
    table.claim(number, 0, WRITE)
    assert not table.verify(number, WRITE, tuple(found))
    assert str(recorder.error) == f"block of rank {at % 4} at position {at // 4} differs from what was announced"


def test_a_commit_covers_every_grain(table: OfferTable, number: int, recorder: Recorder) -> None:
    table.claim(number, 0, WRITE)
    table.verify(number, WRITE, FOUND)
    with pytest.raises(ChecksumMismatch, match="digest over all blocks"):
        table.commit(number, Commit(1, digest_of([11, 12, 21, 23]), b""))
    assert recorder.calls == FAILED


@pytest.mark.parametrize("num_grains", [1, 4])
def test_a_write_in_other_grains_than_agreed_fails_the_offer(
    table: OfferTable, number: int, recorder: Recorder, num_grains: int
) -> None:
    assert table.claim(number, 0, Write(0, (1,) * num_grains, num_grains)) is None
    assert f"in {num_grains} grains where 2 were agreed" in str(recorder.error)
    assert recorder.calls == FAILED


def test_a_write_reads_back_with_its_grains() -> None:
    assert Write.decode(WRITE.encode()) == WRITE
