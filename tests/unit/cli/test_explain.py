"""`tandem status --explain`: what was chosen, why, and how to force it."""

from __future__ import annotations

from dataclasses import replace

from cli.explain_view import SPLIT_ALL, explain
from tandem.client import ClusterStatus, WorkerStatus
from tandem.cluster_status import HandoffPair, PlacementCount, RecentActivity
from tandem.decision import Decision
from tandem.types import WorkerId
from tests.registering import IDLE, INFO

KERNELS = Decision("kernels", "cpu", "triton: needs a GPU", "--attention-backend")
POOL = Decision("KV pool", "8 blocks", "--kv-blocks says so", "--kv-blocks")


def worker(name: str, *decisions: Decision) -> WorkerStatus:
    info = replace(INFO, worker_id=WorkerId(name), decisions=decisions)
    return WorkerStatus(info, replace(IDLE, step_objective_s=0.012, chunk_tokens=384), 0.1, connected=True)


STATUS = ClusterStatus(
    *("demo", True, "", 0, 0, 0),
    (worker("w-0", KERNELS), worker("w-1", KERNELS), worker("w-2", KERNELS, POOL)),
    decisions=(Decision("requests under way at a time", "256", "by seats", "--max-active-requests"),),
)


def lines(status: ClusterStatus) -> list[str]:
    return [str(line) for line in explain(status)]


def test_workers_that_chose_alike_are_told_together() -> None:
    told = lines(STATUS)
    assert told[:2] == [
        "router:",
        "  requests under way at a time: 256; why: by seats; forced by: --max-active-requests",
    ]
    kernels = "  kernels: cpu; why: triton: needs a GPU; forced by: --attention-backend"
    assert told[2:4] == ["w-0, w-1:", kernels]
    assert told[4:7] == ["w-2:", kernels, "  KV pool: 8 blocks; why: --kv-blocks says so; forced by: --kv-blocks"]


def test_objective_and_chunks_are_told_as_they_are_now() -> None:
    assert "w-0 now: steps of at most 12 ms, chunks of at most 384 prompt tokens, 0 steps/s" in lines(STATUS)


def test_each_pair_has_its_transport_and_why_not_a_faster_one() -> None:
    assert "no hand-off between workers yet" in lines(STATUS)
    pair = HandoffPair("p", "d", 3, 2_500_000, 0.0042, "tcp", "shm: it is on another machine")
    told = lines(replace(STATUS, handoffs=(pair,)))
    assert "  p to d: tcp, 3, median 4.2 ms, 2.5 MB; passed over: shm: it is on another machine" in told


def test_requests_are_split_or_it_says_why_not() -> None:
    assert lines(STATUS)[-1] == "no request has ended yet"
    counts = (PlacementCount("local_held", 3, "held"), PlacementCount("remote_faster", 2, "split: sooner"))
    told = lines(replace(STATUS, recent=RecentActivity(last_placements=counts)))
    assert told[-4:] == [
        "of the last 5 requests 2 were split: prompt on one worker, decode on another",
        "  3: held",
        "  2: split: sooner",
        f"  {SPLIT_ALL}",
    ]
