"""Requests find the worker that holds what they begin with."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from shell.prefix_hash import block_hashes, salt_hash
from tandem.types import Role, TokenId
from tandem.v1 import inference_pb2 as pb

P, D = Role.PREFILL, Role.DECODE
PROMPT = tuple(map(TokenId, range(1, 41)))  # two blocks of 16, and 8 tokens more
NAMES = block_hashes(salt_hash(""), array("I", PROMPT).tobytes(), 16)


async def tokens_of(call: Any) -> list[int]:
    return [each async for response in call for each in response.token_ids]


def num_known(cluster: Any, worker: Any) -> int:
    link = cluster.router.workers.link(worker.info)
    return 0 if link is None else int(link.held.num_reported(NAMES))


async def tell(cluster: Any, worker: Any, num_blocks: int = len(NAMES)) -> None:
    """Returns once the router has heard it."""
    worker.tell_cache(NAMES[:num_blocks], cleared=True)
    await cluster.until(lambda: num_known(cluster, worker) == num_blocks)


async def test_the_prefill_worker_that_reports_a_prefix_gets_the_prompts_that_begin_with_it(cluster: Any) -> None:
    workers = [await cluster.add(P, f"p{number}") for number in range(6)]
    await cluster.add(D, "d")
    await tell(cluster, workers[4])
    for _ in range(3):
        assert await tokens_of(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)
    assert [len(each.specs) for each in workers] == [0, 0, 0, 0, 3, 0]


async def test_a_decode_worker_that_reports_nearly_all_computes_the_rest_alone(cluster: Any) -> None:
    prefill, decode = await cluster.add_pair()
    other = await cluster.add(D, "d1")
    await tell(cluster, decode)
    assert await tokens_of(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)
    assert decode.local_limits == [16]
    assert not prefill.specs
    assert not other.specs
    await tell(cluster, decode, 1)
    assert await tokens_of(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)
    assert len(prefill.specs) == 1, "24 tokens are more than a block"


async def test_where_the_cache_has_less_than_was_said_a_prefill_worker_computes_and_nobody_is_blamed(
    cluster: Any,
) -> None:
    prefill, decode = await cluster.add_pair()
    await tell(cluster, decode)
    decode.forgets = True
    for _ in range(5):
        assert await tokens_of(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)
    assert len(prefill.specs) == len(decode.local_limits) == 5
    assert not any(view.set_aside for view in cluster.router.workers.views())
    assert not any(call[0] == "TryFailed" for each in cluster.recorded.requests for call in each.calls)
    await cluster.until(lambda: prefill.idle and decode.idle)


async def test_a_lost_stream_takes_what_was_known_of_the_cache_with_it(cluster: Any) -> None:
    prefill, decode = await cluster.add_pair()
    await tell(cluster, decode)
    await decode.stop_serving()
    await cluster.until(lambda: num_known(cluster, decode) == 0)
    await decode.serve_again()
    await cluster.until(lambda: cluster.router.workers.readiness() is None)
    assert await tokens_of(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)
    assert not decode.local_limits
    assert len(prefill.specs) == 1


async def test_a_salt_keeps_a_request_from_what_others_have_cached(cluster: Any) -> None:
    prefill, decode = await cluster.add_pair()
    await tell(cluster, decode)
    assert await tokens_of(cluster.generate(*PROMPT)) == cluster.completion(PROMPT, 8)
    assert len(decode.local_limits) == 1
    salted = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.SamplingParams(max_tokens=8), cache_salt="mine"
    )
    assert await tokens_of(cluster.inference.Generate(salted, timeout=20)) == cluster.completion(PROMPT, 8)
    assert len(decode.local_limits) == 1
    assert len(prefill.specs) == 1


@pytest.mark.parametrize("num_tokens", [3, 6])
async def test_a_replay_finds_the_decode_worker_that_holds_what_was_said(cluster: Any, num_tokens: int) -> None:
    """The prompt and what was emitted are looked for, so that a worker with both computes no more than it lacks."""
    prefill, first = await cluster.add_pair()
    first.pause_at(num_tokens)
    call = cluster.generate(*PROMPT)
    await cluster.until(lambda: first.offsets == [num_tokens])
    second = await cluster.add(D, "d1")
    await tell(cluster, second)
    await first.die()
    assert await tokens_of(call) == cluster.completion(PROMPT, 8)
    assert second.local_limits == [16]
    assert len(prefill.specs) == 1
