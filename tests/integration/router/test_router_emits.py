"""What the router emits, whichever way a request goes."""

from __future__ import annotations

from typing import Any

import pytest

from router.request import Caller, CompletionRequest, TokensPrompt
from router.sampling import SamplingRequest
from tandem.errors import DeadlineExceeded, Overloaded, Reason, Unavailable
from tandem.types import FinishReason, PlacementReason, Role

PROMPT = (72, 105)


async def only_request(cluster: Any) -> Any:
    """The one request that was begun, once it has ended."""
    await cluster.until(lambda: cluster.recorded.requests and "RequestEnded" in cluster.recorded.requests[0].names)
    (request,) = cluster.recorded.requests
    return request


async def test_a_request_is_told_from_its_admission_to_its_end(cluster: Any) -> None:
    prefill, decode = await cluster.add_pair()
    await cluster.read_tokens(cluster.generate(*PROMPT, max_tokens=8))
    request = await only_request(cluster)
    assert set(request.names) == {"Admitted", "Placed", "PromptComputed", "KvArrived", "TokensArrived", "RequestEnded"}
    assert request.names[:2] == ["Admitted", "Placed"]
    began = request.began
    assert (began.num_prompt_tokens, began.sampling.max_tokens, began.priority) == (2, 8, 0)
    assert request.args("Placed")[:3] == (prefill.info, decode.info, PlacementReason.REMOTE_STATIC)
    assert request.args("KvArrived")[:2] == (4096, 0.125)
    assert sum(call[1] for call in request.calls if call[0] == "TokensArrived") == 8
    assert (request.end.finish_reasons, request.end.num_completion_tokens) == ((FinishReason.LENGTH,), 8)


async def test_a_prompt_computed_by_the_decode_worker_has_no_prefill_worker(cluster: Any) -> None:
    decode = await cluster.add(Role.DECODE, "d0", local_prefill_tokens=None)
    await cluster.read_tokens(cluster.generate(*PROMPT))
    request = await only_request(cluster)
    assert request.args("Placed")[:3] == (None, decode.info, PlacementReason.LOCAL_STATIC)
    assert "KvArrived" not in request.names


@pytest.mark.parametrize(("timeout_s", "error"), [(None, type(None)), (0.0, DeadlineExceeded)])
async def test_a_request_that_is_given_up_before_its_first_step_has_an_end(
    cluster: Any, timeout_s: float | None, error: type
) -> None:
    request = CompletionRequest(TokensPrompt(PROMPT), SamplingRequest(max_tokens=4))
    async with cluster.router.entrance.run(request, Caller(timeout_s, "")):
        pass
    given_up = await only_request(cluster)
    assert given_up.names == ["RequestEnded"]
    assert isinstance(given_up.end.error, error)


async def test_a_replay_is_placed_again_and_its_tokens_are_told_once(cluster: Any) -> None:
    _, decode = await cluster.add_pair()
    decode.pause_at(4)
    call = cluster.generate(*PROMPT, max_tokens=12)
    await cluster.until(lambda: decode.offsets == [4])
    other_prefill, other_decode = await cluster.add_pair("1")
    lost = decode.info
    await decode.die()
    await cluster.read_tokens(call)
    request = await only_request(cluster)
    culprit, error = request.args("TryFailed")
    assert (culprit, error.reason) == (lost, Reason.WORKER_LOST)
    assert [call[2] for call in request.calls if call[0] == "Placed"] == [lost, other_decode.info]
    assert sum(call[1] for call in request.calls if call[0] == "TokensArrived") == 12
    await cluster.until(lambda: other_prefill.idle)


async def test_the_last_try_that_fails_is_told_too(launch: Any, policy: Any) -> None:
    cluster = await launch(policy=policy(max_retries=0, patience_s=0.2))
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    call = cluster.generate(*PROMPT)
    await cluster.until(lambda: bool(decode.sequences))
    await decode.die()
    await cluster.error_of(call)
    request = await only_request(cluster)
    assert request.names[-2:] == ["TryFailed", "RequestEnded"]
    assert isinstance(request.end.error, Unavailable)


async def test_a_router_that_drains_refuses(cluster: Any) -> None:
    cluster.router.entrance.begin_drain()
    await cluster.error_of(cluster.generate(*PROMPT))
    assert [error.reason for error in cluster.recorded.refusals] == [Reason.DRAINING]


async def test_a_full_queue_refuses_before_anything_is_tokenized(launch: Any) -> None:
    cluster = await launch(max_active_requests=1, max_queued_requests=0)
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    first = cluster.generate(*PROMPT)
    await cluster.until(lambda: cluster.router.queue.num_active == 1)
    await cluster.error_of(cluster.generate(*PROMPT))
    assert [type(error) for error in cluster.recorded.refusals] == [Overloaded]
    decode.let_go()
    await cluster.read_tokens(first)


async def test_a_request_that_admission_turns_away_ends_without_a_place(launch: Any) -> None:
    cluster = await launch(max_active_requests=1, max_queued_tokens=3)
    _, decode = await cluster.add_pair()
    decode.hold("decode")
    running = [cluster.generate(*PROMPT)]
    await cluster.until(lambda: cluster.router.queue.num_active == 1)
    running.append(cluster.generate(*PROMPT))
    await cluster.until(lambda: cluster.router.queue.num_queued == 1)
    await cluster.error_of(cluster.generate(*PROMPT))
    refused = cluster.recorded.requests[-1]
    assert refused.names == ["RequestEnded"]
    assert isinstance(refused.end.error, Overloaded)
    decode.let_go()
    for call in running:
        await cluster.read_tokens(call)
