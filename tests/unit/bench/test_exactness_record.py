"""A run of `bench.exactness` that was ended goes on where it was."""

from __future__ import annotations

from pathlib import Path

from bench.exactness import Record, check_checkpoint
from bench.support.systems import Settings

HEAD = "llama                    shm       block 16 chunk  64  "


def test_what_the_record_has_is_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "record.txt"
    Record(file).add(HEAD, "34/34 prompts equal", is_good=True)
    Record(file).add("llama                    bfloat16 logits: ", "ratio 0.75", is_good=True)

    no_checkpoint = tmp_path / "nothing"
    assert check_checkpoint("llama", no_checkpoint, [("shm", Settings(16, 64))], 200, 0, Record(file))


def test_what_differed_runs_again(tmp_path: Path) -> None:
    file = tmp_path / "record.txt"
    Record(file).add(HEAD, "33/34 prompts equal", is_good=False)

    assert not Record(file).has(HEAD)
