"""The served systems of the exactness check: real processes, on one transport or colocated."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from bench.support.cluster import serve
from bench.support.systems import MAX_SEQS, Settings, System
from kvtransfer.transports import TRANSPORTS, available_between
from tandem.client import AsyncClient

POOL_TOKENS = 4096 * MAX_SEQS
"""Room for every prompt of a batch, so that nothing is preempted; preemption has its own tests."""


class ServedSystem:
    """Every prompt as a request of its own, all at once, through gRPC."""

    def __init__(self, target: str) -> None:
        self._target = target

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """See `System.generate`."""
        return asyncio.run(self._generate(prompts, max_tokens))

    async def _generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        async with AsyncClient(self._target) as client:
            await client.wait_ready(timeout_s=60)
            done = await asyncio.gather(
                *(
                    client.complete(token_ids=prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
                    for prompt in prompts
                )
            )
        return [[int(token_id) for token_id in completion.choices[0].token_ids] for completion in done]


@contextmanager
def _open(folder: Path, settings: Settings, roles: tuple[str, ...]) -> Iterator[System]:
    options = (
        *("--dtype", "float32", "--block-size", str(settings.block_size)),
        *("--chunk-tokens", str(settings.chunk_tokens), "--max-seqs", str(MAX_SEQS)),
        *("--kv-blocks", str(POOL_TOKENS // settings.block_size), "--device", settings.device),
        *("--model-impl", settings.model_impl),
    )
    with serve(str(folder), *roles, *options) as cluster:
        yield ServedSystem(cluster.target)


def _disaggregated(transport: str) -> Callable[[Path, Settings], AbstractContextManager[System]]:
    return functools.partial(_open, roles=("--prefill", "1", "--decode", "1", "--transport", transport))


SERVED_SYSTEMS: dict[str, Callable[[Path, Settings], AbstractContextManager[System]]] = {
    **{transport.name: _disaggregated(transport.name) for transport in TRANSPORTS},
    "colocated": functools.partial(
        _open, roles=("--prefill", "0", "--decode", "1", "--local-prefill-tokens", "unlimited")
    ),
}


def served_on(device: str) -> list[str]:
    """The names of those that work with two workers' pools on `device`."""
    statuses = available_between(device, torch.cuda.device_count())
    unusable = {status.name for status in statuses if not status.usable}
    return [name for name in SERVED_SYSTEMS if name not in unusable]
