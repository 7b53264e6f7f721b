"""Weights that are replaced under a running fleet: workers restart with them one by one while callers go on."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import models.demo
from bench.support.fleet import Fleet
from bench.support.ports import free_ports
from tandem.client import AsyncClient, Client
from tandem.types import Role, TokenId

PROMPTS = ("The fox", "A small bear", "The old owl saw", "Every morning the hare")
NUM_TOKENS = 48
NUM_CALLERS = 4
ROLES = (Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE)


def other_weights(folder: Path) -> None:
    """Puts other weights in the place of a folder's, as a deployment does: by rename."""
    (file,) = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: each + 0.1 * torch.randn(each.shape, generator=generator) for name, each in load_file(file).items()
    }
    made = folder / "new"
    save_file({name: each.contiguous() for name, each in weights.items()}, made, {"format": "pt"})
    made.replace(file)


class Callers:
    """Requests without a pause; what became of each."""

    def __init__(self, target: str) -> None:
        self.answers: list[tuple[str, tuple[TokenId, ...]]] = []
        self.errors: list[str] = []
        self._target = target
        self._going = True

    async def run(self) -> None:
        """Until `stop`."""
        async with AsyncClient(self._target) as client, asyncio.TaskGroup() as tasks:
            for number in range(NUM_CALLERS):
                tasks.create_task(self._call(client, PROMPTS[number % len(PROMPTS)]))

    def stop(self) -> None:
        """Begins no further request."""
        self._going = False

    async def _call(self, client: AsyncClient, prompt: str) -> None:
        while self._going:
            try:
                self.answers.append((prompt, await answer(client, prompt)))
            except Exception as error:  # noqa: BLE001  (each is told in the end)
                self.errors.append(repr(error))


async def answer(client: AsyncClient, prompt: str) -> tuple[TokenId, ...]:
    """The tokens that follow a prompt."""
    done = await client.complete(
        prompt, max_tokens=NUM_TOKENS, temperature=1.0, seed=1, ignore_eos=True, timeout_s=120.0
    )
    return done.choices[0].token_ids


async def answers(target: str) -> dict[str, tuple[TokenId, ...]]:
    """What the workers that serve now say."""
    async with AsyncClient(target) as client:
        return {prompt: await answer(client, prompt) for prompt in PROMPTS}


@pytest.mark.timeout(600)
async def test_a_roll_out_of_new_weights_fails_and_mixes_no_request(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(Path(models.demo.__file__).parent / "checkpoint", folder)
    names = [f"{role.value}-{number // 2}" for number, role in enumerate(ROLES)]
    with Fleet(free_ports(1), str(folder)) as fleet:
        fleet.start_router(0)
        for role, name in zip(ROLES, names, strict=True):
            await asyncio.to_thread(fleet.start_worker, role, name)
        before = await answers(fleet.target)
        callers = Callers(fleet.target)
        calling = asyncio.create_task(callers.run())
        other_weights(folder)
        for role, name in zip(ROLES, names, strict=True):
            await asyncio.to_thread(fleet.stop, name)
            await asyncio.to_thread(fleet.start_worker, role, name)
        callers.stop()
        await calling
        after = await answers(fleet.target)
        with Client(fleet.target) as client:
            apart = [each.info.worker_id for each in client.status().workers if each.set_apart]

    assert set(before.values()).isdisjoint(after.values())
    kinds = Counter(
        "old" if tokens == before[prompt] else "new" if tokens == after[prompt] else "mixed"
        for prompt, tokens in callers.answers
    )
    assert callers.errors == []
    assert kinds.keys() == {"old", "new"}, kinds
    assert apart == []
