"""The ways to move payload, and which of them work on this machine."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import torch

from tandem.errors import ConfigError

SHM = "shm"
TCP = "tcp"
AUTO = "auto"


class TransportStatus(NamedTuple):
    """Whether pools on one device can use a transport; `reason` says why not, else what it does."""

    name: str
    usable: bool
    reason: str


def available(device: torch.device | str) -> list[TransportStatus]:
    """Every transport by preference, for pools on `device`; one on a GPU is reached through its mirror."""
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        reason = f"pools on {kind} cannot be reached by this version"
        return [TransportStatus(name, False, reason) for name in (SHM, TCP)]
    statuses = (_shm_status(), TransportStatus(TCP, True, "payload over the network, received into the blocks"))
    through = "" if kind == "cpu" else ", through a copy of the pool in host memory"
    return [status._replace(reason=status.reason + through * status.usable) for status in statuses]


def usable(device: torch.device | str) -> tuple[str, ...]:
    """Names of the transports that work for pools on `device`, by preference."""
    return tuple(status.name for status in available(device) if status.usable)


def choose(choice: str, device: torch.device | str) -> tuple[str, ...]:
    """`auto` or one name as the transports to offer, best first. Raises ConfigError if none of them works here."""
    statuses = available(device)
    names = tuple(status.name for status in statuses if status.usable and choice in (AUTO, status.name))
    if not names:
        reasons = "; ".join(f"{status.name}: {status.reason}" for status in statuses if not status.usable)
        raise ConfigError("--transport", f"{choice} does not work with KV on {device}; {reasons}")
    return names


def _shm_status() -> TransportStatus:
    if sys.platform != "linux":
        return TransportStatus(SHM, False, f"needs Linux, this is {sys.platform}")
    try:
        os.close(os.memfd_create("tandem-probe"))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return TransportStatus(SHM, False, f"needs memfd and pidfd: {error.strerror}")
    return TransportStatus(SHM, True, "sender writes into the receiver's memory on the same machine")
