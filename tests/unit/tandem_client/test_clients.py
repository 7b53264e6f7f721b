"""Both clients against one scripted router: what one does, the other does."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
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


class OnThreads:
    """The synchronous client, called as the asynchronous one is."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return partial(asyncio.to_thread, getattr(self._client, name))

    async def generate(self, *prompt: str, **options: Any) -> AsyncIterator[GenerationUpdate]:
        updates = self._client.generate(*prompt, **options)
        try:
            while (update := await asyncio.to_thread(next, updates, None)) is not None:
                yield update
        finally:
            updates.close()


@pytest.fixture
async def aio(server: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.target) as client:
        yield client


@pytest.fixture(params=["asynchronous", "synchronous"])
def client(request: pytest.FixtureRequest, server: Any, aio: AsyncClient) -> Iterator[Any]:
    with Client(server.target) as sync:
        yield OnThreads(sync) if request.param == "synchronous" else aio


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


async def test_a_generation_streams_its_updates(server: Any, client: Any) -> None:
    server.router.responses = DELTAS
    check_updates([update async for update in client.generate("p", max_tokens=2, request_id="r")])
    assert server.router.requests[0].sampling.max_tokens == 2
    assert server.router.requests[0].request_id == "r"


async def test_closing_a_stream_cancels_its_request(server: Any, client: Any) -> None:
    server.router.responses, server.router.endless = DELTAS, True
    async with contextlib.aclosing(client.generate("p")) as updates:
        assert (await anext(updates)).text == "Once"
    assert server.router.stream_ended.wait(5)


async def test_a_closed_client_says_so_to_calls_under_way_and_after(server: Any, client: Any) -> None:
    server.router.responses, server.router.endless = DELTAS, True
    updates = client.generate("p")
    await anext(updates)
    await anext(updates)
    waiting = asyncio.create_task(anext(updates))
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(Unavailable, match="closed"):
        await waiting
    for call in (client.status, client.serving):
        with pytest.raises(Unavailable, match="closed"):
            await call()


async def test_a_cancelled_caller_of_a_closed_async_client_stays_cancelled(server: Any, aio: AsyncClient) -> None:
    server.router.endless = True
    waiting = asyncio.create_task(anext(aio.generate("p")))
    await asyncio.sleep(0)
    waiting.cancel()
    await aio.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_closed_client_waits_for_no_server(server: Any, client: Any) -> None:
    server.set_serving(False)
    waiting = asyncio.create_task(client.wait_ready(60))
    await asyncio.sleep(0.05)
    await client.close()
    async with asyncio.timeout(10):
        for wait in (waiting, client.wait_ready(60)):  # which says something else once its time is over
            with pytest.raises(Unavailable, match="closed"):
                await wait


async def test_an_answer_may_be_of_any_length(server: Any, client: Any) -> None:
    server.router.text = "x" * (MAX_RECEIVE_BYTES + 1)
    assert (await client.complete("p")).choices[0].text == server.router.text


async def test_errors_keep_their_class_and_field(server: Any, client: Any, invalid_top_p: Any) -> None:
    server.router.error = invalid_top_p
    with pytest.raises(InvalidRequest, match="top_p") as caught:
        [_ async for _ in client.generate("p")]
    assert caught.value.field == "sampling.top_p"


async def test_a_deadline_ends_a_stream(server: Any, client: Any) -> None:
    server.router.endless = True
    with pytest.raises(DeadlineExceeded):
        [_ async for _ in client.generate("p", timeout_s=0.1)]


async def test_calls_of_one_message(server: Any, client: Any) -> None:
    completion = await client.complete(messages=[{"role": "user", "content": "hi"}], seed=1)
    assert (completion.text, completion.choices[0].matched_stop) == ("once", 5)
    assert server.router.requests[-1].generate.chat.messages[0].content == "hi"
    tokenized = await client.tokenize("ab")
    assert (tokenized.tokens, tokenized.token_ids) == (("a", "b"), (1, 2))
    assert await client.detokenize([1, 2]) == "ab"
    model = await client.model()
    assert (model.max_logprobs, model.eos_token_ids) == (20, {3})
    (worker,) = (await client.status()).workers
    assert (worker.info.role, worker.load.pool.free, worker.heartbeat_age_s) == (Role.DECODE, 4, 0.5)
    await client.drain("decode-0")
    assert server.router.requests[-1].worker_id == "decode-0"


async def test_nobody_listening_is_unavailable_at_once(server: Any, client: Any) -> None:
    server.stop()
    with pytest.raises(Unavailable):
        await client.status()


async def test_waiting_ends_when_the_server_begins_to_serve(server: Any, client: Any) -> None:
    server.set_serving(False)
    with pytest.raises(DeadlineExceeded, match="not ready"):
        await client.wait_ready(0.2)
    threading.Timer(0.05, server.set_serving, [True]).start()
    await client.wait_ready(5)


def test_both_clients_offer_the_same_calls() -> None:
    def calls(cls: type) -> dict[str, list[str]]:
        public = {name: member for name, member in vars(cls).items() if not name.startswith("_")}
        return {name: list(inspect.signature(member).parameters) for name, member in public.items()}

    assert calls(AsyncClient) == calls(Client)
