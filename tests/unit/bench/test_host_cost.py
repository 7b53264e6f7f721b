"""The simulated cost of the host's time beside prompts."""

from __future__ import annotations

from bench.host_cost import cliffs, run
from bench.workload import closed_loop


def test_a_long_launch_costs_throughput_and_gaps_without_a_cliff() -> None:
    load, launch_ms = closed_loop(16, 512, 64), (6.0, 12.0, 14.4)
    found = [run(load, each) for each in launch_ms]
    rates = [each["tokens_per_s"] for each in found]
    assert cliffs(launch_ms, rates) == []
    assert rates[0] == max(rates)
    assert found[0]["gap_ms"] <= found[2]["gap_ms"]


def test_a_cliff_is_a_larger_loss_than_steps_get_longer() -> None:
    assert cliffs((0, 5, 10, 20), (100.0, 99.5, 60.0, 31.0)) == []
    assert cliffs((0, 5, 10, 20), (100.0, 95.0, 50.0, 40.0)) == [5, 10]
