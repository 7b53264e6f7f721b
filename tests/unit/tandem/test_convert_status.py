"""The cluster's status survives the wire."""

from __future__ import annotations

from google.protobuf.json_format import MessageToDict

from tandem.cluster_status import (
    ClusterStatus,
    HandoffPair,
    LatencySummary,
    PlacementCount,
    ReasonCount,
    RecentActivity,
    SlowRequest,
    WorkerStatus,
)
from tandem.convert import status_from_proto, status_to_proto
from tandem.decision import Decision
from tandem.types import Incarnation, PoolCounts, Role, WorkerId, WorkerInfo, WorkerLoad
from tandem.v1 import cluster_pb2

INFO = WorkerInfo(
    *(WorkerId("w"), Incarnation("i"), Role.DECODE, "h:1", "m", "c", "f", "l", ("shm",), None, 256, 7, "cpu", "h:2"),
    decisions=(Decision("kernels", "cpu", "no GPU", "--attention-backend"),),
)
STATUS = ClusterStatus(
    model="m",
    ready=False,
    not_ready_reason="no prefill worker",
    queued_requests=1,
    queued_tokens=2,
    active_requests=3,
    workers=(
        WorkerStatus(
            INFO,
            WorkerLoad(
                *(1, 2, 3, 4, PoolCounts(21, 1, 2, 3, 4, 11, 16, 5), 6),
                draining=True,
                preemptions=8,
                prompt_tokens_per_s=900.5,
                step_s=0.025,
                step_objective_s=0.05,
                running_for_others=1,
                waiting_for_others=2,
                steps_per_s=40.5,
                chunk_tokens=512,
                device_used_bytes=1,
                device_total_bytes=2,
            ),
            0.25,
            connected=True,
        ),
    ),
    version="1.2",
    uptime_s=99.5,
    admin_address="h:3",
    recent=RecentActivity(
        60.0,
        1.5,
        40.5,
        (LatencySummary("inter_token", 9, 0.1, 0.2, 0.3),),
        100,
        2000,
        (PlacementCount("local_short", 4, "short"),),
        300,
        200,
        (PlacementCount("remote_static", 3, "split"), PlacementCount("local_held", 1, "held")),
    ),
    decisions=(Decision("requests", "256", "by seats", "--max-active-requests"),),
    handoffs=(HandoffPair("p", "d", 2, 4096, 0.5, "tcp", "shm: elsewhere"),),
    failures=(ReasonCount("WORKER_LOST", 1),),
    refusals=(ReasonCount("QUEUE_FULL", 2),),
    slow_requests=(SlowRequest("r", "a" * 32, "stop", 5.0, 9.0, 0.5, 12, 34, "p", "d"),),
)


def test_a_status_survives_the_wire() -> None:
    wire = status_to_proto(STATUS).SerializeToString()

    assert status_from_proto(cluster_pb2.GetStatusResponse.FromString(wire)) == STATUS


def test_every_field_of_the_message_is_told() -> None:
    told = MessageToDict(status_to_proto(STATUS), preserving_proto_field_name=True)

    assert told.keys() | {"ready"} == {field.name for field in cluster_pb2.GetStatusResponse.DESCRIPTOR.fields}
    assert told["recent"].keys() == {field.name for field in cluster_pb2.RecentActivity.DESCRIPTOR.fields}
