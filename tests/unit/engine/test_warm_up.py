"""Warm-up takes a step of every kind, within any pool."""

from __future__ import annotations

import pytest

from engine.loading import warm_up


class Recorder:
    def __init__(self):
        self.steps = []

    def run(self, step):
        self.steps += [(len(seq.token_ids), seq.context_len, len(seq.block_table), seq.samples) for seq in step.seqs]


def test_every_kind_of_step_is_taken_once():
    runner = Recorder()
    warm_up(runner, num_blocks=100, block_size=16)
    assert [step[:3] for step in runner.steps] == [(33, 0, 3), (17, 33, 4), (1, 50, 4), (1, 51, 4)]
    temperatures = [[sample.params.temperature for sample in samples] for *_, samples in runner.steps]
    assert temperatures == [[], [0.0], [0.0], [1.0]]


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4])
def test_a_small_pool_is_not_overrun(num_blocks):
    runner = Recorder()
    warm_up(runner, num_blocks=num_blocks, block_size=16)
    assert all(blocks <= num_blocks for _, _, blocks, _ in runner.steps)


def test_a_runner_takes_the_steps(decoder, kv_cache):
    from engine.runner import Runner

    warm_up(Runner(decoder, kv_cache), kv_cache.num_blocks, kv_cache.layout.block_size)
