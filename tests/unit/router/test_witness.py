from __future__ import annotations

from typing import Any

import pytest

from router.placement import Demand
from router.tuning import IN_A_ROW
from router.witness import Witness
from router.workers import Workers
from shell.telemetry.events import TokensArrived
from tandem.errors import InternalError, PeerLost, Reason, TandemError, Unavailable
from tandem.types import Role, WorkerInfo

DEMAND = Demand(num_tokens=10, max_total_tokens=20)
P, D = Role.PREFILL, Role.DECODE


@pytest.fixture
def pair(workers: Workers, info: Any, load: Any) -> tuple[WorkerInfo, WorkerInfo]:
    """The only two."""
    members = info(P, "p"), info(D, "d")
    for each in members:
        workers.heartbeat(each, load())
        link = workers.link(each)
        assert link is not None
        link.connected = True
    return members


def set_aside(workers: Workers) -> set[str]:
    return {view.info.worker_id for view in workers.views() if view.set_aside}


async def fails(workers: Workers, witness: Witness, culprit: WorkerInfo, error: TandemError) -> None:
    witness.begin(await workers.place(DEMAND, 0.0))
    witness.failed(culprit, error)
    witness.end()


async def test_broken_steps_are_held_against_the_worker_once_the_request_went_well(
    workers: Workers, pair: tuple[WorkerInfo, WorkerInfo]
) -> None:
    witnesses = [Witness(workers) for _ in range(IN_A_ROW)]
    for witness in witnesses:
        await fails(workers, witness, pair[0], InternalError("not finite"))
    assert set_aside(workers) == set()
    for witness in witnesses:
        witness.begin(await workers.place(DEMAND, 0.0))
        witness.hear(TokensArrived(1))  # the first one is the prefill worker's: the other half may break yet
        assert set_aside(workers) == set()
    for witness in witnesses:
        witness.finished()
        witness.end()
    assert set_aside(workers) == {"p"}


@pytest.mark.parametrize(
    ("error", "aside", "num_pairs"),
    [
        (Unavailable("no", Reason.WORKER_LOST), {"d"}, 0),
        (Unavailable("no", Reason.DRAINING), set(), 0),
        (PeerLost("no"), set(), 1),
    ],
)
async def test_what_a_failure_says_of_whom(
    workers: Workers, pair: tuple[WorkerInfo, WorkerInfo], error: TandemError, aside: set[str], num_pairs: int
) -> None:
    for _ in range(IN_A_ROW):
        await fails(workers, Witness(workers), pair[1], error)
    assert (set_aside(workers), workers.num_pairs_set_aside) == (aside, num_pairs)


async def test_a_request_that_was_cancelled_says_nothing(workers: Workers, pair: tuple[WorkerInfo, WorkerInfo]) -> None:
    witness = Witness(workers)
    for _ in range(10):
        witness.begin(await workers.place(DEMAND, 0.0))
        witness.end()
        witness.end()
    assert (set_aside(workers), workers.num_pairs_set_aside) == (set(), 0)
    assert workers.views()[1].assigned_seqs == 0
