"""Runs the texts of KServe requests, and says what came of them as ModelInferResponses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass

from router.entrance import Entrance
from router.faces.kserve.model import OUTPUTS, VERSION
from router.faces.kserve.request import InferRequest
from router.faces.kserve.statistics import Statistics
from router.faces.kserve.tensors import pack_bytes, pack_uint32
from router.request import Caller
from tandem.foreign import kserve_pb2
from tandem.types import FinishReason

FINAL = "triton_final_response"


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """What is new of one text's answer."""

    text: str
    num_input_tokens: int
    num_output_tokens: int
    """New ones."""
    finish_reason: FinishReason | None
    """Set on the last one."""


class Texts:
    """Shared by all calls of the KServe face."""

    def __init__(self, entrance: Entrance, statistics: Statistics) -> None:
        self._entrance = entrance
        self._statistics = statistics

    async def updates(self, request: InferRequest, index: int, caller: Caller) -> AsyncGenerator[TextUpdate, None]:
        """Updates of text `index` as they come, or all in one if the request is not to be streamed.

        Raises as `Entrance.run` does, and what ends a running request. Close it to cancel.
        """
        prompt = request.texts[index] if request.echo else ""
        with self._statistics.text() as finish:
            async with self._entrance.run(request.completions[index], caller) as running:
                last = False
                while not last:
                    outputs = [await running.delivery.get()] if request.stream else await running.delivery.get_all()
                    (output,) = outputs  # a text has one completion here
                    if output.summary is not None:
                        last = True
                        finish(output.summary)
                    yield TextUpdate(
                        prompt + output.text, running.num_prompt_tokens, len(output.token_ids), output.finish_reason
                    )


def response(model: str, request: InferRequest, updates: Sequence[TextUpdate]) -> kserve_pb2.ModelInferResponse:
    """One update per text of the request, as the tensors it wants; none = a response without outputs."""
    tensor = kserve_pb2.ModelInferResponse.InferOutputTensor
    outputs = request.outputs if updates else ()
    return kserve_pb2.ModelInferResponse(
        model_name=model,
        model_version=VERSION,
        id=request.id,
        outputs=[tensor(name=name, datatype=OUTPUTS[name], shape=request.shape) for name in outputs],
        raw_output_contents=[_CONTENTS[name](updates) for name in outputs],
    )


def mark_final(message: kserve_pb2.ModelInferResponse, final: bool) -> kserve_pb2.ModelInferResponse:
    """Says on a stream whether this is its request's last response."""
    message.parameters[FINAL].bool_param = final
    return message


_CONTENTS: Mapping[str, Callable[[Sequence[TextUpdate]], bytes]] = {
    "text_output": lambda updates: pack_bytes(each.text.encode() for each in updates),
    "finish_reason": lambda updates: pack_bytes((each.finish_reason or "").encode() for each in updates),
    "num_input_tokens": lambda updates: pack_uint32(each.num_input_tokens for each in updates),
    "num_output_tokens": lambda updates: pack_uint32(each.num_output_tokens for each in updates),
}
"""Raw contents of each output; finish_reason is empty until the text has ended."""
