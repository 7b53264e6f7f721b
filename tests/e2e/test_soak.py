"""The short form of `bench.soak`, half a minute for each setup; its seed is another one each time, and printed."""

from __future__ import annotations

import secrets

import pytest

from bench.soak import setups, soak
from bench.soak_round import Account

pytestmark = pytest.mark.usefixtures("real_commands")

MINUTES = len(setups()) / 2


@pytest.fixture(scope="module")
def accounts() -> list[Account]:
    seed = secrets.randbelow(10**6)
    print(f"python -m bench.soak --minutes {MINUTES:g} --seed {seed}")
    return soak(seed, MINUTES)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_minutes_of_faults_bring_no_wrong_token_no_hang_and_no_leak(accounts: list[Account]) -> None:
    assert [what for account in accounts for what in account.violations] == []


@pytest.mark.soak
def test_the_soak_did_something_everywhere(accounts: list[Account]) -> None:
    assert len(accounts) >= len(setups())
    for account in accounts:
        assert account.faults, account.title
        assert account.served, account.title
