"""What a worker says of itself when it registers, for tests in which it does not matter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from router.assignment import Assignment
from router.placement import Placement
from tandem.types import Incarnation, PoolCounts, Role, WorkerId, WorkerInfo, WorkerLoad

INFO = WorkerInfo(
    worker_id=WorkerId("decode-0"),
    incarnation=Incarnation("ab" * 16),
    role=Role.DECODE,
    address="127.0.0.1:1",
    model="demo",
    config_fingerprint="c",
    model_fingerprint="m",
    layout_fingerprint="l",
    transports=("tcp",),
    local_prefill_tokens=0,
    max_sequence_tokens=64,
    pid=1,
    device="fake",
)
IDLE = WorkerLoad(
    engine_steps=7,
    running_seqs=0,
    waiting_seqs=0,
    queued_prompt_tokens=0,
    pool=PoolCounts(total=8, free=8, reserved=0, receiving=0, live=0, quarantined=0, block_size=16, unused_slots=0),
    live_transfers=0,
    draining=False,
)
BUSY = replace(IDLE, running_seqs=2)


class UncountedLoad:
    """A router's workers as an attempt reports to them, where nobody looks at their load."""

    def arrive(self, *_: Any) -> None:
        pass

    def end(self, *_: Any, arrived: bool) -> None:
        pass

    handed_off = decoded = arrive


def assigned(placement: Placement) -> Assignment:
    """The pair of a request of one token."""
    return Assignment(placement, num_tokens=1, num_seqs=1, probe=0)
