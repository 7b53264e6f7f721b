"""A bug while a hand-off is taken over costs that request alone, wherever it strikes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decode_worker.running_batch import RunningBatch
from engine.group import Group
from engine.prefix_cache import PrefixCache
from tandem.types import GroupSpec, TokenId

MakeSpec = Callable[..., GroupSpec]
Completion = Callable[..., list[TokenId]]


@pytest.mark.parametrize(("owner", "call"), [(PrefixCache, "insert"), (RunningBatch, "join"), (Group, "land")])
async def test_a_bug_while_a_hand_off_lands_fails_that_request_and_frees_its_blocks(
    open_bench: Any,
    make_spec: MakeSpec,
    completion: Completion,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    call: str,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    async with open_bench() as bench:
        spec = make_spec(9, 7)
        unlucky = bench.reserve(1, spec)
        ticket = await bench.ticket(unlucky)
        with monkeypatch.context() as patched:
            patched.setattr(owner, call, broken)
            bench.hand_off(ticket, spec)
        assert bench.router.errors[unlucky].retryable
        assert bench.cache.num_available == bench.pool.num_blocks
        handle = bench.reserve(2, spec)
        first = bench.hand_off(await bench.ticket(handle), spec)
        await bench.router.until(lambda: handle in bench.router.ended)
        assert [first[0], *bench.router.tokens[handle]] == completion(spec)
