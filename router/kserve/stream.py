"""One ModelStreamInfer call: any number of requests at once, answered as they come.

reading ──request──▶ a task of its own ──▶ responses under its id, or one error; the stream lives on
   │
   ├─ the client is done sending ─▶ the call ends with its last answer
   ├─ the call is cancelled ──────▶ every task is, and releases what it holds
   └─ the router drains ──────────▶ UNAVAILABLE once nothing runs on it: a stream left open holds up no drain
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc.aio

from router.entrance import Context, Entrance
from router.kserve.request import InferRequest, read_request
from router.kserve.texts import Texts, mark_final, response
from router.pipeline import Pipeline
from tandem.errors import InvalidRequest, Reason, TandemError, Unavailable
from tandem.foreign import kserve_pb2
from tandem.rpc.status import bug_logged
from tandem.telemetry.logging import get_logger

_log = get_logger(__name__)

_MAX_REQUESTS = 1024
"""Under way on one stream; further ones stay unread, so that the client's flow control holds them."""


class InferStream:
    """Serves one call; `run` it once."""

    def __init__(self, model: str, entrance: Entrance, texts: Texts, pipeline: Pipeline, context: Context) -> None:
        self._model = model
        self._entrance = entrance
        self._texts = texts
        self._pipeline = pipeline
        self._context = context
        self._places = asyncio.Semaphore(_MAX_REQUESTS)
        self._writing = asyncio.Lock()
        self._num_running = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._all_read = False
        """Whether the client is done sending."""

    async def run(self, requests: AsyncIterator[kserve_pb2.ModelInferRequest]) -> None:
        """Returns when all is answered. Raises Unavailable when the router drains, CancelledError with the call."""
        try:
            async with asyncio.TaskGroup() as group:
                drain = group.create_task(self._end_on_drain(), name="stream drain")
                async for request in requests:
                    await self._places.acquire()
                    self._num_running += 1
                    self._quiet.clear()
                    group.create_task(self._answer(request), name="stream request")
                self._all_read = True
                await self._quiet.wait()
                drain.cancel()
        except BaseExceptionGroup as errors:
            # The first to fail is the reason; the others were cancelled with it, or failed the same way.
            raise errors.exceptions[0] from None

    async def _end_on_drain(self) -> None:
        await self._pipeline.wait_for_drain()
        await self._quiet.wait()
        if self._all_read:
            return  # the stream ends well by itself
        raise Unavailable("the router is draining", Reason.DRAINING)

    async def _answer(self, message: kserve_pb2.ModelInferRequest) -> None:
        try:
            with self._entrance.judging():
                request = read_request(message)
                if len(request.texts) != 1:
                    raise InvalidRequest("inputs.text_input", "must hold one text on a stream; ModelInfer takes more")
            await self._generate(request)
        except TandemError as error:
            await self._fail(message, error)
        except grpc.aio.BaseError:  # the peer is gone: so is the stream
            raise
        except Exception as error:  # noqa: BLE001  (the task's root)
            await self._fail(message, bug_logged(_log, "a request on a stream failed by a bug", error))
        finally:
            self._places.release()
            self._num_running -= 1
            if self._num_running == 0:
                self._quiet.set()

    async def _generate(self, request: InferRequest) -> None:
        async with aclosing(self._texts.updates(request, 0, self._context)) as updates:
            async for update in updates:
                last = update.finish_reason is not None
                final = last and not request.empty_final_response
                await self._write(infer_response=mark_final(response(self._model, request, [update]), final))
                if last and request.empty_final_response:
                    await self._write(infer_response=mark_final(response(self._model, request, []), True))

    async def _fail(self, message: kserve_pb2.ModelInferRequest, error: TandemError) -> None:
        about = kserve_pb2.ModelInferResponse(model_name=message.model_name, id=message.id)
        await self._write(error_message=error.message, infer_response=mark_final(about, True))

    async def _write(self, *, infer_response: kserve_pb2.ModelInferResponse, error_message: str = "") -> None:
        async with self._writing:  # the call takes one write at a time
            await self._context.write(
                kserve_pb2.ModelStreamInferResponse(error_message=error_message, infer_response=infer_response)
            )
