"""The ways to move payload, and which of them work on this machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtransfer.transport import Transport, TransportStatus
from kvtransfer.transports import cuda_ipc, nccl, nixl, shm, tcp
from tandem.decision import Decision, decision
from tandem.errors import ConfigError

AUTO = "auto"
CUDA_IPC = cuda_ipc.NAME
NCCL = nccl.NAME
NIXL = nixl.NAME
SHM = shm.NAME
TCP = tcp.NAME

TRANSPORTS: tuple[Transport, ...] = (
    cuda_ipc.CudaIpcTransport(),
    shm.ShmTransport(),
    nixl.NixlTransport(),
    nccl.NcclTransport(),
    tcp.TcpTransport(),
)
"""All that this version has, best first; a new one is added here and nowhere else."""


def available(device: torch.device | str) -> list[TransportStatus]:
    """Every transport by preference, for pools on `device`."""
    return [transport.probe(torch.device(device)) for transport in TRANSPORTS]


def available_between(device: torch.device | str, num_gpus: int) -> list[TransportStatus]:
    """Returns the transports that two workers of one machine with `num_gpus` GPUs can use."""
    share = torch.device(device).type == "cuda" and num_gpus == 1
    reason = "it connects pools on different GPUs only, and this machine has one GPU"
    return [
        TransportStatus(status.name, False, reason) if share and transport.gpu_each and status.usable else status
        for transport, status in zip(TRANSPORTS, available(device), strict=True)
    ]


def usable(device: torch.device | str) -> tuple[str, ...]:
    """Names of the transports that work for pools on `device`, by preference."""
    return tuple(status.name for status in available(device) if status.usable)


def choose(choice: str, device: torch.device | str, num_ranks: int = 1) -> tuple[tuple[str, ...], Decision]:
    """`auto` or one name as the transports to offer, best first, and why. Raises ConfigError if none works here.

    `num_ranks` divide the pool.
    """
    statuses = [
        TransportStatus(status.name, False, "it does not reach pools that ranks divide")
        if num_ranks > 1 and status.usable and not transport.splits
        else status
        for transport, status in zip(TRANSPORTS, available(device), strict=True)
    ]
    names = tuple(status.name for status in statuses if status.usable and choice in (AUTO, status.name))
    if not names:
        reason = "; ".join(status.reason for status in statuses if choice in (AUTO, status.name))
        others = ", ".join(status.name for status in statuses if status.usable)
        remedy = (
            f"leave --transport out, or say one that works here: {others}" if others else "`tandem doctor` lists all"
        )
        raise ConfigError("--transport", f"{choice} does not work with KV on {device}: {reason}; {remedy}")
    why = "; ".join(f"{status.name}: {status.reason}" for status in statuses if not status.usable)
    return names, decision("transports", ", ".join(names), "--transport", choice != AUTO, why or "all work here")


def named(names: Sequence[str], known: Sequence[Transport] = TRANSPORTS) -> tuple[Transport, ...]:
    """The transports of these names, best first. Raises ConfigError on one that this version does not have."""
    for name in names:
        if name not in {transport.name for transport in known}:
            all_names = ", ".join(transport.name for transport in known)
            raise ConfigError("transport", f"{name!r} is not one of {all_names}")
    return tuple(transport for transport in known if transport.name in names)
