"""Simulated hand-offs report what a real sender does."""

from __future__ import annotations

import asyncio

import pytest

from kvtransfer.base import TransferReport
from simulator.costs import CostModel, StepCosts
from simulator.loop import run_simulated
from simulator.transfers import Network, SimulatedReceiver, SimulatedSender
from tandem.errors import TransferError
from tandem.types import BlockId

COSTS = CostModel(StepCosts(0.01), kv_bytes_per_token=1000, handoff_s=0.2, handoff_bytes_per_s=16_000.0)
"""A block takes a second."""


class _Listener:
    """Counts nothing."""

    def on_receiving(self) -> None:
        """The writer has come."""

    def on_committed(self, first_token_payload: bytes) -> None:
        """All is there."""

    def on_failed(self, error: TransferError) -> None:
        """Not here."""

    def on_writer_stopped(self) -> None:
        """Not here."""


def test_time_in_which_the_next_chunk_is_computed_is_no_part_of_a_handoff() -> None:
    """As a real sender counts: placement takes expected hand-offs from these reports."""

    async def hand_off() -> TransferReport:
        network = Network(COSTS)
        offer = SimulatedReceiver(network).offer((), _Listener(), 60.0)
        handoff = await SimulatedSender(network).open(offer.ticket, offer.endpoint, 1.0)
        await handoff.push(0, [BlockId(0)])
        await asyncio.sleep(30.0)
        await handoff.push(1, [BlockId(1)])
        return await handoff.commit(b"")

    assert run_simulated(hand_off()).seconds == pytest.approx(2.0 + COSTS.handoff_s / 2)
