"""The short form of `bench.soak`, half a minute of faults for each setup; its seed is another one each time."""

from __future__ import annotations

import secrets

import pytest

from bench.soak import setups, soak
from bench.soak_changes import GUEST, NEW_WEIGHTS
from bench.soak_round import Account

pytestmark = pytest.mark.usefixtures("real_commands")

FLEETS = ("2+2", "auto")
MINUTES = 0.75 * len(setups(FLEETS))


@pytest.fixture(scope="module")
def accounts() -> list[Account]:
    seed = secrets.randbelow(10**6)
    print(f"python -m bench.soak --minutes {MINUTES:g} --seed {seed} --fleets {' '.join(FLEETS)}")
    return soak(seed, MINUTES, fleets=FLEETS)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_minutes_of_faults_bring_no_wrong_token_no_hang_and_no_leak(accounts: list[Account]) -> None:
    assert [what for account in accounts for what in account.violations] == []


@pytest.mark.soak
def test_the_soak_did_something_everywhere(accounts: list[Account]) -> None:
    assert len(accounts) >= len(setups(FLEETS))
    for account in accounts:
        assert account.faults.keys() > {NEW_WEIGHTS, GUEST}, account.title
        assert account.served, account.title
