"""Runs the texts of KServe requests; says what came of them as ModelInferResponses, and of all as ModelStatistics."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass

from router.entrance import Entrance
from router.faces.kserve.model import OUTPUTS, VERSION
from router.faces.kserve.request import InferRequest
from router.faces.kserve.tensors import pack_bytes, pack_uint32
from router.metrics import Summary
from router.request import Caller
from shell.clock import Clock
from tandem.foreign import kserve_pb2 as pb
from tandem.types import FinishReason

FINAL = "triton_final_response"
_NANOSECONDS = 1e9
_MILLISECONDS = 1e3


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """New part of the answer to a text."""

    text: str
    num_input_tokens: int
    num_output_tokens: int
    """New ones."""
    num_cached_tokens: int
    """Tokens of the input that a cache held."""
    finish_reason: FinishReason | None
    """Reason of the end; set on the last update."""


class Texts:
    """Shared by all calls of the KServe face; counts what came of each text, since the router started."""

    def __init__(self, entrance: Entrance, clock: Clock) -> None:
        self._entrance = entrance
        self._clock = clock
        self._num_finished = 0
        self._num_failed = 0
        self._finished_s = 0.0
        self._queued_s = 0.0
        self._failed_s = 0.0
        self._last_finish_s = 0.0

    async def updates(self, request: InferRequest, index: int, caller: Caller) -> AsyncGenerator[TextUpdate, None]:
        """Updates of text `index` as they come, or all in one if the request is not to be streamed.

        Raises as `Entrance.run` does, and what ends a running request. Close it to cancel.
        """
        began_s = self._clock.now_s()
        summary: Summary | None = None
        try:
            async with self._entrance.run(request.completions[index], caller) as running:
                while summary is None:
                    outputs = [await running.delivery.get()] if request.stream else await running.delivery.get_all()
                    (output,) = outputs  # a text has one completion here
                    summary = output.summary
                    yield TextUpdate(
                        request.echoes[index] + output.text,
                        len(running.prompt_token_ids),
                        len(output.token_ids),
                        running.timeline.cached_tokens,
                        output.finish_reason,
                    )
        finally:
            self._count(summary, self._clock.now_s() - began_s)

    def statistics(self, model: str) -> pb.ModelStatistics:
        """For ModelStatistics."""
        return pb.ModelStatistics(
            name=model,
            version=VERSION,
            last_inference=int(self._last_finish_s * _MILLISECONDS),
            inference_count=self._num_finished,
            execution_count=self._num_finished,
            inference_stats=pb.InferStatistics(
                success=_duration(self._num_finished, self._finished_s),
                fail=_duration(self._num_failed, self._failed_s),
                queue=_duration(self._num_finished, self._queued_s),
                compute_infer=_duration(self._num_finished, self._finished_s - self._queued_s),
            ),
        )

    def _count(self, summary: Summary | None, seconds: float) -> None:
        """One text ended: finished if it has a summary, else failed after so many seconds."""
        if summary is None:
            self._num_failed += 1
            self._failed_s += seconds
            return
        self._num_finished += 1
        self._finished_s += summary.total_s
        self._queued_s += min(summary.queue_s, summary.total_s)
        self._last_finish_s = time.time()


def response(model: str, request: InferRequest, updates: Sequence[TextUpdate]) -> pb.ModelInferResponse:
    """One update per text of the request, as the tensors it wants; none = a response without outputs."""
    tensor = pb.ModelInferResponse.InferOutputTensor
    outputs = request.outputs if updates else ()
    return pb.ModelInferResponse(
        model_name=model,
        model_version=VERSION,
        id=request.id,
        outputs=[tensor(name=name, datatype=OUTPUTS[name], shape=request.shape) for name in outputs],
        raw_output_contents=[_CONTENTS[name](updates) for name in outputs],
    )


def mark_final(message: pb.ModelInferResponse, final: bool) -> pb.ModelInferResponse:
    """Says on a stream whether this is its request's last response."""
    message.parameters[FINAL].bool_param = final
    return message


_CONTENTS: Mapping[str, Callable[[Sequence[TextUpdate]], bytes]] = {
    "text_output": lambda updates: pack_bytes(each.text.encode() for each in updates),
    "finish_reason": lambda updates: pack_bytes((each.finish_reason or "").encode() for each in updates),
    "num_input_tokens": lambda updates: pack_uint32(each.num_input_tokens for each in updates),
    "num_output_tokens": lambda updates: pack_uint32(each.num_output_tokens for each in updates),
    "num_cached_tokens": lambda updates: pack_uint32(each.num_cached_tokens for each in updates),
}
"""Raw contents of each output; finish_reason is empty until the text has ended."""


def _duration(count: int, seconds: float) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count, ns=int(max(0.0, seconds) * _NANOSECONDS))
