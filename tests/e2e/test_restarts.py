"""The short form of `bench.soak --kind restart`: each worker is killed a few times under load, over every transport."""

from __future__ import annotations

import pytest

from bench.soak.restarts import run
from kvtransfer.transports import usable

ROUNDS = 1
"""Of each half, after one that is not counted."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", usable("cpu"))
def test_workers_that_die_again_and_again_leave_the_others_as_they_were(transport: str) -> None:
    halves = run(transport, ROUNDS)
    assert [half.victim for half in halves] == ["prefill-0", "decode-0"]
    for half, survivor in zip(halves, ("decode-0", "prefill-0"), strict=True):
        assert half.violations == ()
        assert half.calls
        assert {survivor, "router", "serve"} <= half.after.keys()
