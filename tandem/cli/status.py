"""`tandem status`: what one router knows of its cluster, as tables or JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from tandem.cli.command import Subparsers, add_command
from tandem.cli.table import table
from tandem.client import Client, ClusterStatus, WorkerStatus
from tandem.config import ClientConfig, add_arguments, load


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    parser = add_command(
        subparsers,
        "status",
        run,
        "workers, roles, pools, queues and transfers of a cluster",
        "As the asked router knows them from heartbeats.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_arguments(parser, ClientConfig)


def run(namespace: argparse.Namespace) -> int:
    """Prints the status. Raises TandemError."""
    config = load(ClientConfig, namespace)
    with Client(config.target, security=config.security) as client:
        status = client.status(timeout_s=config.timeout_s)
    print(json.dumps(asdict(status), ensure_ascii=False) if namespace.json else render(status))
    return 0


def render(status: ClusterStatus) -> str:
    """The whole status, for people."""
    ready = "ready" if status.ready else f"not ready: {status.not_ready_reason}"
    lines = [
        f"model {status.model}, {ready}",
        f"requests: {status.active_requests} active, {status.queued_requests} queued"
        f" ({status.queued_tokens} prompt tokens)",
    ]
    if not status.workers:
        return "\n".join([*lines, "no workers"])
    workers = sorted(status.workers, key=lambda worker: (worker.info.role, worker.info.worker_id))
    return "\n".join([*lines, "", _workers(workers), "", _pools(workers)])


def _workers(workers: list[WorkerStatus]) -> str:
    header = "worker role address pid device state heartbeat steps running waiting prompt-tokens transfers preempted"
    return table(
        header.split(),
        [
            (
                *(worker.info.worker_id, worker.info.role, worker.info.address, worker.info.pid, worker.info.device),
                *(_state(worker), f"{worker.heartbeat_age_s:.1f} s ago", worker.load.engine_steps),
                *(worker.load.running_seqs, worker.load.waiting_seqs, worker.load.queued_prompt_tokens),
                *(worker.load.live_transfers, worker.load.preemptions),
            )
            for worker in workers
        ],
    )


def _pools(workers: list[WorkerStatus]) -> str:
    header = "blocks total free reserved receiving live quarantined block-size unused-slots"
    pools = [(worker.info.worker_id, worker.load.pool) for worker in workers]
    return table(
        header.split(),
        [
            (
                *(name, pool.total, pool.free, pool.reserved, pool.receiving),
                *(pool.live, pool.quarantined, pool.block_size, pool.unused_slots),
            )
            for name, pool in pools
        ],
    )


def _state(worker: WorkerStatus) -> str:
    if not worker.connected:
        return "not connected"
    return "draining" if worker.load.draining else "serving"
