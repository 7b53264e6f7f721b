"""New weights in a soak, rolled out: who is restarted, and what lies in the model's folder."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from random import Random

from bench.soak.changes import NEW_WEIGHTS, Changes
from bench.soak.model import SoakModel
from bench.support.cluster import eventually
from bench.support.processes import children
from tests.waiting_program import waiting_program


def test_weights_are_replaced_by_rename_and_are_really_different() -> None:
    with SoakModel.laid() as model, (model.folder / "model.safetensors").open("rb") as opened:
        before = opened.read()
        model.swap()
        opened.seek(0)

        assert opened.read() == before, "who has the old file open keeps it"
        assert (model.folder / "model.safetensors").read_bytes() != before
        assert [each.name for each in model.folder.iterdir() if each.name.startswith(".")] == []
        model.swap()
        assert (model.folder / "model.safetensors").read_bytes() == before


async def test_a_roll_out_ends_each_worker_that_has_the_old_weights_and_no_other(tmp_path: Path) -> None:
    said: list[str] = []
    with (
        SoakModel.laid() as model,
        waiting_program(tmp_path, "decode_worker", "--worker-id=decode-0") as old,
        waiting_program(tmp_path, "router") as router,
    ):
        assert await asyncio.to_thread(eventually, lambda: len(children(os.getpid())) == 2)
        changes = Changes(os.getpid(), "127.0.0.1:1", model, (), Random(1), said.append)
        await changes.roll_out()
        with waiting_program(tmp_path, "prefill_worker", "--worker-id=prefill-0") as new:
            assert await asyncio.to_thread(eventually, lambda: "prefill-0" in children(os.getpid()))
            await changes.finish()

            assert old.wait(10) in (-signal.SIGTERM, -signal.SIGKILL)
            assert (new.poll(), router.poll()) == (None, None)
    assert changes.counts == {NEW_WEIGHTS: 1}
