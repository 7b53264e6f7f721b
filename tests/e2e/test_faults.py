"""The short form of `bench.soak --kind kill`: one process is killed under load. The long form measures recovery."""

from __future__ import annotations

import pytest

from bench.soak.kills import Case, run_case

CLIENTS = 4
REQUESTS_EACH = 12


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_no_request_fails_when_the_only_worker_of_its_role_is_killed(
    victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_PATIENCE_SECONDS", "60")  # a busy machine takes long to load a worker

    outcome = run_case(Case(1, 1, victim), CLIENTS, REQUESTS_EACH)

    assert outcome.requests >= CLIENTS * REQUESTS_EACH
    assert (outcome.failed_in_flight, outcome.failed_later, outcome.wrong) == (0, 0, 0), outcome
    assert outcome.recovery_s is not None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["router", "router-0"])
def test_of_a_killed_router_only_calls_in_flight_fail(victim: str) -> None:
    """`router` is started again; `router-0` is one of two, and clients go on with the other one."""
    outcome = run_case(Case(1, 1, victim, clients_wait=True), CLIENTS, REQUESTS_EACH)

    assert outcome.requests >= CLIENTS * REQUESTS_EACH
    assert (outcome.failed_later, outcome.wrong) == (0, 0), outcome
    assert outcome.failed_in_flight <= CLIENTS
    assert outcome.service_back_s is not None
