"""How long this side waits for a peer. All durations are seconds on the local monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """`lease_s`: silence after which a peer is lost; a third of it passes between heartbeats."""

    lease_s: float = 5.0
    reply_s: float = 10.0
    """Most time for an answer (credit, COMMITTED) from a peer that is alive, since anything moved on the connection.

    With pieces of 16 MiB, a wire slower than 1.7 MB/s counts as standing still."""
    stop_s: float = 2.0
    """Most time that `stop` waits for peers to say that they stopped writing."""

    @property
    def heartbeat_s(self) -> float:
        """Longest pause between two frames of a healthy side."""
        return self.lease_s / 3
