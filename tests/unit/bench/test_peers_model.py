from pathlib import Path

import pytest

from bench.peers import tandem_engine, transformers_engine
from bench.peers.job import Job
from bench.support.checkpoints import PEER_SHAPES, write_checkpoint

JOB = Job(num_seqs=3, prompt_tokens=20, decode_steps=2, budget_tokens=32, seed=5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoke")
    write_checkpoint(PEER_SHAPES["smoke"], folder)
    return folder


def test_engines_do_the_same_work_on_the_same_checkpoint(checkpoint: Path) -> None:
    ours = tandem_engine.open_engine(checkpoint, 1).run(JOB)
    theirs = transformers_engine.open_engine(checkpoint, 1).run(JOB)
    assert len(ours.step_s) == len(theirs.step_s) == JOB.decode_steps
    assert ours.first_tokens == theirs.first_tokens
