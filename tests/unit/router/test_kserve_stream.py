"""One ModelStreamInfer call whose client reads slowly: what the router reads ahead, keeps, and repeats."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

from router.faces.kserve.servicer import MAX_BYTES, MAX_REQUESTS, InferStream, StreamRoom
from tandem.foreign import kserve_pb2

MIB = 1024 * 1024
MAX_ID_BYTES = 256


class Client:
    """The call's context, and who is at its other end. Nothing but the call's `write` is ever asked for."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.answers: list[Any] = []
        self.num_taken = 0
        """How many of its requests the router has read."""

    async def write(self, answer: Any) -> None:
        await self.reads.wait()
        self.answers.append(answer)

    async def requests(self, *requests: Any) -> AsyncIterator[Any]:
        for request in requests:
            self.num_taken += 1
            yield request


class NothingRuns:
    """An entrance for streams whose every request is refused by what it says."""

    def judging(self) -> Any:
        return nullcontext()

    async def wait_for_drain(self) -> None:
        await asyncio.Event().wait()


def stream(client: Any) -> InferStream:
    rooms: Any = NothingRuns()
    return InferStream("m", rooms, rooms, client, MAX_ID_BYTES)


def wrong(num_bytes: int = 0, request_id: str = "a") -> kserve_pb2.ModelInferRequest:
    """A request that is refused, of about that size."""
    return kserve_pb2.ModelInferRequest(id=request_id, raw_input_contents=[bytes(num_bytes)])


class OfAnotherVersion:
    """As much of a ModelInferRequest as is looked at before it is refused. protobuf's own allows no weak references."""

    id = "a"
    model_name = "m"
    model_version = "2"

    def ByteSize(self) -> int:  # noqa: N802
        return 0


async def settle() -> None:
    """Lets everything go on until it waits for somebody else."""
    for _ in range(1000):
        await asyncio.sleep(0)


async def test_a_client_that_does_not_read_is_read_from_only_up_to_a_number_of_bytes() -> None:
    client = Client()
    serving = asyncio.create_task(stream(client).run(client.requests(*[wrong(MIB)] * 50)))

    await settle()

    assert client.num_taken <= MAX_BYTES // MIB + 1
    client.reads.set()
    await serving
    assert len(client.answers) == 50


async def test_a_refused_request_is_not_kept_while_its_answer_waits() -> None:
    client = Client()
    requests = [OfAnotherVersion(), OfAnotherVersion()]
    refused = weakref.ref(requests[0])
    serving = asyncio.create_task(stream(client).run(client.requests(*requests)))
    requests.clear()

    await settle()
    gc.collect()

    assert client.num_taken == 2
    assert refused() is None
    client.reads.set()
    await serving


async def test_an_error_names_its_request_as_triton_does() -> None:
    client = Client()
    client.reads.set()

    await stream(client).run(client.requests(wrong(request_id="one"), wrong(request_id="")))

    first, second = client.answers
    assert (first.infer_response.id, second.infer_response.id) == ("one", "")
    assert first.error_message.startswith("[request id: one] raw_input_contents: ")
    assert second.error_message.startswith("[request id: <id_unknown>] raw_input_contents: ")


async def test_an_id_that_is_too_long_is_cut_where_it_is_repeated() -> None:
    client = Client()
    client.reads.set()

    await stream(client).run(client.requests(wrong(request_id="é" * 100_000)))

    (answer,) = client.answers
    assert answer.infer_response.id == "é" * (MAX_ID_BYTES // 2)
    assert answer.ByteSize() < 1024


async def enters(room: StreamRoom, num_bytes: int) -> bool:
    """Whether a request finds room at once; if so, it stays."""
    entering = asyncio.ensure_future(room.enter(num_bytes))
    await settle()
    return entering.done() or not entering.cancel()


async def test_one_request_has_room_however_large_it_is() -> None:
    room = StreamRoom()

    assert await enters(room, 2 * MAX_BYTES)
    assert not await enters(room, 1)
    room.leave(2 * MAX_BYTES)
    assert await enters(room, MAX_BYTES - 1)
    assert await enters(room, 1)
    assert not await enters(room, 1)


async def test_room_is_bounded_in_number_too() -> None:
    room = StreamRoom()
    for _ in range(MAX_REQUESTS):
        await room.enter(0)

    assert not await enters(room, 0)
    room.leave(0)
    assert await enters(room, 0)


async def test_a_stream_is_empty_once_the_last_request_has_left() -> None:
    room = StreamRoom()
    await room.enter(1)
    await room.enter(2)
    waiting = asyncio.ensure_future(room.empty())
    room.leave(1)
    await settle()
    assert not waiting.done()

    room.leave(2)

    await waiting
