"""What failed tries say of the next one."""

from __future__ import annotations

from typing import Any

import pytest

from router.placement import Placement
from router.retries import Retries, RetryPolicy
from tandem.errors import InternalError, Overloaded, Reason, TandemError, TransferError, Unavailable
from tandem.types import Role

LOST = Unavailable("worker d was lost", Reason.WORKER_LOST)
POLICY = RetryPolicy(max_retries=2, patience_s=10.0, backoff_s=0.1)


class Scene:
    """One request's tries on `p` and `d`."""

    def __init__(self, info: Any, policy: RetryPolicy = POLICY) -> None:
        self.placement = Placement(info(Role.PREFILL, "p"), info(Role.DECODE, "d"))
        self.other = Placement(info(Role.PREFILL, "p1"), info(Role.DECODE, "d1"))
        self.retries = Retries(policy)

    def fail(self, error: TandemError, *, lost: bool = False, progress: int = 0) -> bool:
        """Whether the request goes on after the decode worker failed it."""
        return self.retries.count(error, self.placement.decode, self.placement, lost=lost, progress=progress)


def test_losses_are_no_tries_and_their_pauses_grow_up_to_the_patience(info: Any) -> None:
    scene = Scene(info)
    pauses = []
    for _ in range(12):
        assert scene.fail(LOST, lost=True)
        pauses.append(scene.retries.pause_s(LOST))
    assert pauses == pytest.approx([0, 0, 1, 10, 10, 10, 10, 10, 10, 10, 10, 10])
    assert not scene.retries.are_spent


def test_tries_are_spent_by_failures_and_only_untried_workers_may_follow(info: Any) -> None:
    scene = Scene(info)
    for number in range(1, 4):
        assert scene.fail(TransferError("bytes differ"))
        assert scene.retries.are_spent is (number > 2)
    assert not scene.retries.may_take(scene.placement)
    assert scene.retries.may_take(scene.other)


def test_progress_makes_failures_undone(info: Any) -> None:
    scene = Scene(info)
    for _ in range(3):
        scene.fail(TransferError("bytes differ"))
    scene.fail(LOST, lost=True, progress=POLICY.progress_tokens)
    assert not scene.retries.are_spent
    assert scene.retries.blamed == {scene.placement.decode.incarnation}


def test_a_request_that_breaks_on_two_workers_is_at_fault(info: Any) -> None:
    scene = Scene(info)
    assert scene.fail(InternalError("a step failed"))
    assert not scene.fail(InternalError("a step failed"), lost=True)


def test_a_full_worker_is_asked_again_later_and_later(info: Any) -> None:
    scene = Scene(info)
    pauses = []
    for _ in range(3):
        scene.fail(Overloaded("no seat"))
        pauses.append(scene.retries.pause_s(Overloaded("no seat")))
    assert pauses == pytest.approx([0.1, 0.2, 0.3])
