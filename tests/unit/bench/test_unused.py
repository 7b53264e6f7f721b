"""How a cost is told: by the median of ratios, and how sure it is."""

from __future__ import annotations

import argparse
import random

import pytest

from bench.page import render
from bench.peers.served import AUTO_OPTIONS, TANDEM_SERVERS, with_pool
from bench.peers.streams import OnFirst, Prompt, Stream
from bench.small_pool import Account
from bench.unused import SERVERS, cost_of, step_s
from shell.config import ServeConfig, add_arguments, load


@pytest.mark.parametrize(
    ("rounds", "lowest", "highest"), [(5, None, None), (6, 1.01, 1.06), (9, 1.02, 1.08)], ids=["5", "6", "9"]
)
def test_the_ratio_is_the_median_of_the_rounds_own(rounds: int, lowest: float | None, highest: float | None) -> None:
    off_s = [0.01 * 2**number for number in range(rounds)]  # the machine slows down
    on_s = [(1.01 + number / 100) * each for number, each in enumerate(off_s)]

    cost = cost_of(4, on_s, off_s)

    assert cost.ratio == pytest.approx(1.01 + (rounds - 1) / 200)
    assert (cost.lowest, cost.highest) == pytest.approx((lowest, highest))


async def test_a_step_is_timed_where_all_streams_decode() -> None:
    class Client:
        def __init__(self) -> None:
            self.first_s = iter((1.0, 5.0))

        async def generate(self, prompt: Prompt, max_tokens: int, on_first: OnFirst | None = None) -> Stream:
            first_s = next(self.first_s)
            alone_s, together_s = (first_s, first_s + 4), (5.2, 5.4, 5.6)
            return Stream(0.0, tuple((at_s, 1) for at_s in (*alone_s[: 2 if first_s < 5 else 1], *together_s)))

    assert await step_s(Client(), 2, 4, 100, random.Random(0)) == pytest.approx(0.2)


def test_both_records_have_a_section() -> None:
    account = Account(demand_blocks=100, pool_blocks=25)
    account.served["beams"] = 3
    cost = {"streams": 1, "on_ms": 2.0, "off_ms": 1.0, "ratio": 2.0, "lowest": None, "highest": None}
    results = {
        "small-pool": {"callers": 4, "block_size": 16, **account.document()},
        "unused": {"model": "smoke", "rounds": 1, "output_tokens": 8, "bar": 1.02, "costs": [cost]},
    }

    page = render({stem: {"date": "d", "machine": {}, "results": each} for stem, each in results.items()})

    assert "| requests served, beams | 3 |" in page
    assert "| 1 | 1.00 | 2.00 | 2.000 | – |" in page


@pytest.mark.parametrize("options", [*SERVERS.values(), *TANDEM_SERVERS.values(), AUTO_OPTIONS], ids=str)
def test_the_servers_options_are_those_of_a_command(options: tuple[str, ...]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, ServeConfig)
    load(ServeConfig, parser.parse_args(["--model", "demo", *with_pool(options)]), {})
