from hypothesis import given
from hypothesis import strategies as st

from shell.cores import SHARED_PREFILL_NICE, CoreShare, plan_cores


def test_two_cores_give_prefill_and_decode_one_pinned_core_each() -> None:
    plan = plan_cores((0, 1), 1, 1, None)
    assert plan.prefill == (CoreShare((0,), 1),)
    assert plan.decode == (CoreShare((1,), 1),)


def test_a_colocated_server_gets_every_core() -> None:
    assert plan_cores((0, 1), 0, 1, None).decode == (CoreShare((0, 1), 2),)


def test_remaining_cores_go_to_prefill() -> None:
    plan = plan_cores(range(7), 1, 2, None)
    assert [share.threads for share in plan.prefill + plan.decode] == [3, 2, 2]


def test_on_one_core_prefill_yields_to_decode_without_starving() -> None:
    plan = plan_cores((3,), 1, 1, None)
    assert plan.prefill == (CoreShare((3,), 1, SHARED_PREFILL_NICE),)
    assert plan.decode == (CoreShare((3,), 1),)


def test_a_prefill_worker_with_a_core_of_its_own_keeps_its_priority() -> None:
    plan = plan_cores((0, 1, 2), 2, 2, None)
    assert [share.nice for share in plan.prefill] == [0, SHARED_PREFILL_NICE]


def test_threads_that_fit_keep_the_pinning() -> None:
    plan = plan_cores(range(8), 1, 1, 2)
    assert plan.prefill == (CoreShare((0, 1, 2, 3), 2),)


def test_threads_that_do_not_fit_lift_the_pinning() -> None:
    plan = plan_cores((0, 1), 1, 1, 2)
    assert plan.prefill == (CoreShare((0, 1), 2, SHARED_PREFILL_NICE),)
    assert plan.decode == (CoreShare((0, 1), 2),)


@given(st.integers(1, 64), st.integers(0, 8), st.integers(1, 8), st.none() | st.integers(1, 8))
def test_every_worker_gets_cores_and_the_threads_asked_for(
    num_cores: int, num_prefill: int, num_decode: int, threads: int | None
) -> None:
    plan = plan_cores(range(num_cores), num_prefill, num_decode, threads)
    shares = plan.prefill + plan.decode
    assert (len(plan.prefill), len(plan.decode)) == (num_prefill, num_decode)
    assert all(share.cores and set(share.cores) <= set(range(num_cores)) for share in shares)
    assert all(share.threads == threads for share in shares if threads is not None)
    if threads is None and len(shares) <= num_cores:
        assert sorted(core for share in shares for core in share.cores) == list(range(num_cores))
