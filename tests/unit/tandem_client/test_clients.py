"""Both clients against one scripted router: what one does, the other does."""

import asyncio
import contextlib
import inspect
import threading
import time
from typing import Any

import pytest

from tandem.client import AsyncClient, Client, GenerationUpdate
from tandem.errors import DeadlineExceeded, InvalidRequest, Unavailable
from tandem.rpc.channel import MAX_RECEIVE_BYTES
from tandem.types import FinishReason, Role
from tandem.v1 import inference_pb2

DELTAS = [
    inference_pb2.GenerateResponse(
        request_id="r", text="Once", token_ids=[4], logprobs=[{"token_id": 4, "logprob": -1}]
    ),
    inference_pb2.GenerateResponse(
        request_id="r",
        text=" upon",
        token_ids=[5],
        finish_reason="FINISH_REASON_STOP",
        stop_text=" a",
        usage={"prompt_tokens": 2, "completion_tokens": 2},
        timings={"first_token_seconds": 0.25, "transfer_bytes": 64},
    ),
]


@pytest.fixture
async def aio(server: Any) -> Any:
    async with AsyncClient(server.target) as client:
        yield client


@pytest.fixture
def sync(server: Any) -> Any:
    with Client(server.target) as client:
        yield client


def check_updates(updates: list[GenerationUpdate]) -> None:
    assert [update.text for update in updates] == ["Once", " upon"]
    assert updates[0].logprobs[0].logprob == -1
    assert updates[0].finish_reason is None
    assert updates[0].usage is None
    last = updates[-1]
    assert last.finish_reason is FinishReason.STOP
    assert last.matched_stop == " a"
    assert last.usage is not None
    assert last.usage.completion_tokens == 2
    assert last.timings is not None
    assert (last.timings.first_token_s, last.timings.transfer_bytes) == (0.25, 64)


async def test_async_generate_streams_updates(server: Any, aio: AsyncClient) -> None:
    server.router.responses = DELTAS
    check_updates([update async for update in aio.generate("p", max_tokens=2, request_id="r")])
    assert server.router.requests[0].sampling.max_tokens == 2
    assert server.router.requests[0].request_id == "r"


def test_sync_generate_streams_updates(server: Any, sync: Client) -> None:
    server.router.responses = DELTAS
    check_updates(list(sync.generate("p", max_tokens=2, request_id="r")))
    assert server.router.requests[0].sampling.max_tokens == 2


async def test_async_close_cancels_the_request(server: Any, aio: AsyncClient) -> None:
    server.router.responses, server.router.endless = DELTAS, True
    async with contextlib.aclosing(aio.generate("p")) as updates:
        assert (await anext(updates)).text == "Once"
    assert server.router.stream_ended.wait(5)


def test_sync_close_cancels_the_request(server: Any, sync: Client) -> None:
    server.router.responses, server.router.endless = DELTAS, True
    with contextlib.closing(sync.generate("p")) as updates:
        assert next(updates).text == "Once"
    assert server.router.stream_ended.wait(5)


async def test_a_closed_async_client_says_so_to_calls_under_way_and_after(server: Any, aio: AsyncClient) -> None:
    server.router.responses, server.router.endless = DELTAS, True
    updates = aio.generate("p")
    await anext(updates)
    await anext(updates)
    waiting = asyncio.create_task(anext(updates))
    await asyncio.sleep(0)
    await aio.close()
    with pytest.raises(Unavailable, match="closed"):
        await waiting
    for call in (aio.status, aio.serving):
        with pytest.raises(Unavailable, match="closed"):
            await call()
    assert not waiting.cancelled()


async def test_a_cancelled_caller_of_a_closed_async_client_stays_cancelled(server: Any, aio: AsyncClient) -> None:
    server.router.endless = True
    waiting = asyncio.create_task(anext(aio.generate("p")))
    await asyncio.sleep(0)
    waiting.cancel()
    await aio.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_closed_async_client_waits_for_no_server(server: Any, aio: AsyncClient) -> None:
    server.set_serving(False)
    waiting = asyncio.create_task(aio.wait_ready(60))
    await asyncio.sleep(0.05)
    await aio.close()
    for wait in (waiting, aio.wait_ready(60)):  # which says something else once its time is over
        with pytest.raises(Unavailable, match="closed"):
            await wait


def test_a_closed_sync_client_waits_for_no_server(server: Any, sync: Client) -> None:
    server.set_serving(False)
    threading.Timer(0.05, sync.close).start()
    began_s = time.monotonic()
    for _ in range(2):
        with pytest.raises(Unavailable, match="closed"):
            sync.wait_ready(60)
    assert time.monotonic() - began_s < 10


async def test_an_answer_may_be_of_any_length(server: Any, aio: AsyncClient, sync: Client) -> None:
    server.router.text = "x" * (MAX_RECEIVE_BYTES + 1)
    completions = await aio.complete("p"), await asyncio.to_thread(sync.complete, "p")
    assert [each.choices[0].text for each in completions] == [server.router.text] * 2


def test_a_closed_sync_client_says_so_to_calls_under_way_and_after(server: Any, sync: Client) -> None:
    server.router.responses, server.router.endless = DELTAS, True
    updates = sync.generate("p")
    next(updates)
    next(updates)
    threading.Timer(0.05, sync.close).start()
    with pytest.raises(Unavailable, match="closed"):
        next(updates)
    for call in (sync.status, sync.serving):
        with pytest.raises(Unavailable, match="closed"):
            call()


async def test_async_errors_keep_their_class_and_field(server: Any, aio: AsyncClient, invalid_top_p: Any) -> None:
    server.router.error = invalid_top_p
    with pytest.raises(InvalidRequest, match="top_p") as caught:
        async for _ in aio.generate("p"):
            pass
    assert caught.value.field == "sampling.top_p"


def test_sync_errors_keep_their_class_and_field(server: Any, sync: Client, invalid_top_p: Any) -> None:
    server.router.error = invalid_top_p
    with pytest.raises(InvalidRequest, match="top_p") as caught:
        list(sync.generate("p"))
    assert caught.value.field == "sampling.top_p"


async def test_async_deadline_ends_a_stream(server: Any, aio: AsyncClient) -> None:
    server.router.endless = True
    with pytest.raises(DeadlineExceeded):
        async for _ in aio.generate("p", timeout_s=0.1):
            pass


def test_sync_deadline_ends_a_stream(server: Any, sync: Client) -> None:
    server.router.endless = True
    with pytest.raises(DeadlineExceeded):
        list(sync.generate("p", timeout_s=0.1))


async def test_async_unary_calls(server: Any, aio: AsyncClient) -> None:
    completion = await aio.complete(messages=[{"role": "user", "content": "hi"}], seed=1)
    assert (completion.text, completion.choices[0].matched_stop) == ("once", 5)
    assert server.router.requests[-1].generate.chat.messages[0].content == "hi"
    assert (await aio.tokenize("ab")).tokens == ("a", "b")
    assert await aio.detokenize([1, 2]) == "ab"
    assert (await aio.model()).max_logprobs == 20
    status = await aio.status()
    assert (status.workers[0].info.role, status.workers[0].load.pool.free) == (Role.DECODE, 4)
    await aio.drain("decode-0")
    assert server.router.requests[-1].worker_id == "decode-0"


def test_sync_unary_calls(server: Any, sync: Client) -> None:
    completion = sync.complete(token_ids=[1], seed=1)
    assert (completion.text, completion.choices[0].matched_stop) == ("once", 5)
    assert sync.tokenize("ab").token_ids == (1, 2)
    assert sync.detokenize([1, 2]) == "ab"
    assert sync.model().eos_token_ids == {3}
    assert sync.status().workers[0].heartbeat_age_s == 0.5
    sync.drain("decode-0")
    assert server.router.requests[-1].worker_id == "decode-0"


async def test_nobody_listening_is_unavailable_at_once(server: Any) -> None:
    server.stop()
    async with AsyncClient(server.target) as aio:
        with pytest.raises(Unavailable):
            await aio.status()
    with Client(server.target) as sync, pytest.raises(Unavailable):
        sync.status()


async def test_async_wait_ready_returns_when_the_server_begins_to_serve(server: Any, aio: AsyncClient) -> None:
    server.set_serving(False)
    with pytest.raises(DeadlineExceeded, match="not ready"):
        await aio.wait_ready(0.2)
    threading.Timer(0.05, server.set_serving, [True]).start()
    await aio.wait_ready(5)


def test_sync_wait_ready_returns_when_the_server_begins_to_serve(server: Any, sync: Client) -> None:
    server.set_serving(False)
    with pytest.raises(DeadlineExceeded, match="not ready"):
        sync.wait_ready(0.2)
    threading.Timer(0.05, server.set_serving, [True]).start()
    sync.wait_ready(5)


def test_both_clients_offer_the_same_calls() -> None:
    def calls(cls: type) -> dict[str, list[str]]:
        public = {name: member for name, member in vars(cls).items() if not name.startswith("_")}
        return {name: list(inspect.signature(member).parameters) for name, member in public.items()}

    assert calls(AsyncClient) == calls(Client)
