"""Ranks in processes of their own: what they exchange, and that no death, stop or failure keeps the others waiting."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from kernels.group import SoloGroup, tree_sum
from kernels.shared_group import HALF_BYTES, SharedGroup, create_group_memory
from tests.ranks import exchanged, meet, meet_or_fail, ranks_of

WAIT_S = 2.0


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_add_gather_and_hear_rank_0_however_long_a_tensor_is(size):
    with ranks_of(size) as ranks:
        for num_elements, times in ((2, 50), (HALF_BYTES // 4, 1), (3 * HALF_BYTES // 4 + 5, 2)):
            turn = times - 1
            owns = [
                torch.tensor([num_elements - 2.0, num_elements - 1]) + turn * 1000.0 ** (r - 1) for r in range(size)
            ]
            columns = [float(turn + rank) for rank in range(size) for _ in range(1 + rank)]
            expected = tree_sum(owns).tolist(), [columns, columns], [turn] * 3
            assert ranks.run(exchanged, num_elements, times) == expected


def test_no_elements_are_exchanged_without_a_meeting():
    with ranks_of(2) as ranks:
        assert ranks.run(exchanged, 0, 1)[0] == []


@pytest.mark.parametrize(
    ("number", "told"), [(signal.SIGKILL, "rank 1 has ended"), (signal.SIGSTOP, "rank 1 did not answer within 2 s")]
)
def test_a_rank_that_is_killed_or_stopped_ends_the_wait_of_all_others(number, told):
    with ranks_of(4, wait_s=WAIT_S) as ranks:
        ranks.run(meet)
        os.kill(ranks.processes[1].pid, number)
        if number == signal.SIGKILL:
            ranks.processes[1].join()
        begun = time.monotonic()
        others = [ranks.processes[rank] for rank in (0, 2, 3)]
        ranks.give_to((0, 2, 3), meet)
        answers = ranks.take_from((0, 2, 3))
        assert time.monotonic() - begun < 5 * WAIT_S
        assert all("GroupBroken" in str(answer) for answer in answers)
        assert any(told in str(answer) for answer in answers)
        assert all(process.is_alive() for process in others)


def test_ranks_that_were_paused_together_for_longer_than_a_wait_lasts_go_on():
    """As a container or a virtual machine is paused: the clock goes on, and the rank that waits may wake first."""
    with ranks_of(2, wait_s=WAIT_S) as ranks:
        ranks.run(meet)
        ranks.give_to([0], meet)
        ranks.processes[0].join(WAIT_S / 4)  # it waits for the other by now
        for process in ranks.processes:
            os.kill(process.pid, signal.SIGSTOP)
        ranks.processes[0].join(WAIT_S)
        for process in ranks.processes:
            os.kill(process.pid, signal.SIGCONT)
        ranks.give_to([1], meet)
        assert ranks.take() == [None, None]


def test_a_rank_that_gives_up_ends_the_wait_of_all_others_at_once_and_for_ever():
    with ranks_of(2) as ranks:
        ranks.give(meet_or_fail, 1)
        begun = time.monotonic()
        waited, failed = ranks.take()
        assert time.monotonic() - begun < WAIT_S
        assert "another rank gave up" in str(waited)
        assert "ValueError" in str(failed)
        ranks.give(meet)
        assert all("another rank gave up" in str(answer) for answer in ranks.take())


def test_a_rank_that_never_comes_is_missed_in_time():
    descriptor = create_group_memory(2)
    with pytest.raises(Exception, match=r"rank 1 did not answer within 0\.1 s"):
        SharedGroup(descriptor, 0, 2, join_timeout_s=0.1, timeout_s=WAIT_S)
    os.close(descriptor)


def test_sums_of_sums_of_neighbours_are_the_sum_to_the_bit():
    parts = [torch.randn(64, generator=torch.Generator().manual_seed(seed)) * 10.0**seed for seed in range(8)]
    whole = tree_sum(parts)
    for share in (1, 2, 4):
        assert torch.equal(tree_sum([tree_sum(parts[at : at + share]) for at in range(0, 8, share)]), whole)
    assert not torch.equal(sum(parts[1:], parts[0]), whole)


def test_a_single_rank_exchanges_nothing():
    x = torch.randn(2, 3)
    group = SoloGroup()
    assert all(each is x for each in (group.all_reduce(x), group.all_gather(x, [3]), group.broadcast(x)))
