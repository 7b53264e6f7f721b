"""The cluster's status as protobuf and back: `convert`'s part for cluster.proto."""

from __future__ import annotations

from tandem.cluster_status import ClusterStatus, LatencySummary, RecentActivity, WorkerStatus
from tandem.convert import info_from_proto, info_to_proto, load_from_proto, load_to_proto
from tandem.v1 import cluster_pb2


def status_to_proto(status: ClusterStatus) -> cluster_pb2.GetStatusResponse:
    """The answer of GetStatus."""
    return cluster_pb2.GetStatusResponse(
        model=status.model,
        ready=status.ready,
        not_ready_reason=status.not_ready_reason,
        queued_requests=status.queued_requests,
        queued_tokens=status.queued_tokens,
        active_requests=status.active_requests,
        workers=[_worker_to_proto(worker) for worker in status.workers],
        version=status.version,
        uptime_seconds=status.uptime_s,
        admin_address=status.admin_address,
        recent=_recent_to_proto(status.recent),
    )


def status_from_proto(message: cluster_pb2.GetStatusResponse) -> ClusterStatus:
    """The answer of GetStatus. Raises KeyError on a worker of an unknown role."""
    return ClusterStatus(
        model=message.model,
        ready=message.ready,
        not_ready_reason=message.not_ready_reason,
        queued_requests=message.queued_requests,
        queued_tokens=message.queued_tokens,
        active_requests=message.active_requests,
        workers=tuple(_worker_from_proto(worker) for worker in message.workers),
        version=message.version,
        uptime_s=message.uptime_seconds,
        admin_address=message.admin_address,
        recent=_recent_from_proto(message.recent),
    )


def _worker_to_proto(worker: WorkerStatus) -> cluster_pb2.WorkerStatus:
    return cluster_pb2.WorkerStatus(
        info=info_to_proto(worker.info),
        load=load_to_proto(worker.load),
        heartbeat_age_seconds=worker.heartbeat_age_s,
        connected=worker.connected,
    )


def _worker_from_proto(message: cluster_pb2.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        info=info_from_proto(message.info),
        load=load_from_proto(message.load),
        heartbeat_age_s=message.heartbeat_age_seconds,
        connected=message.connected,
    )


def _recent_to_proto(recent: RecentActivity) -> cluster_pb2.RecentActivity:
    return cluster_pb2.RecentActivity(
        window_seconds=recent.window_s,
        requests_per_second=recent.requests_per_s,
        tokens_per_second=recent.tokens_per_s,
        latencies=[
            cluster_pb2.LatencySummary(
                name=each.name,
                count=each.count,
                p50_seconds=each.p50_s,
                p90_seconds=each.p90_s,
                p99_seconds=each.p99_s,
            )
            for each in recent.latencies
        ],
        total_requests=recent.total_requests,
        total_tokens=recent.total_tokens,
    )


def _recent_from_proto(message: cluster_pb2.RecentActivity) -> RecentActivity:
    return RecentActivity(
        window_s=message.window_seconds,
        requests_per_s=message.requests_per_second,
        tokens_per_s=message.tokens_per_second,
        latencies=tuple(
            LatencySummary(each.name, each.count, each.p50_seconds, each.p90_seconds, each.p99_seconds)
            for each in message.latencies
        ),
        total_requests=message.total_requests,
        total_tokens=message.total_tokens,
    )
