"""One generation request, resolved: nothing left to default, nothing left to check."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.clock import Deadline
from tandem.types import RequestId, SamplingParams, SequenceSpec, TextParams, TokenId


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What the pipeline runs."""

    request_id: RequestId
    prompt: tuple[TokenId, ...]
    sampling: SamplingParams
    text: TextParams
    deadline: Deadline
    priority: int = 0
    traceparent: str = ""
    """Trace context of the call that brought it."""
    tracestate: str = ""
    """Goes with it, unchanged."""

    def spec(self, emitted: tuple[TokenId, ...], traceparent: str) -> SequenceSpec:
        """The sequence as a worker is to run it, after `emitted` tokens of its completion.

        `traceparent` is the parent of the worker's spans.
        """
        return SequenceSpec(
            request_id=self.request_id,
            token_ids=self.prompt + emitted,
            num_prompt_tokens=len(self.prompt),
            sampling=self.sampling,
            timeout_s=self.deadline.remaining_s(),
            priority=self.priority,
            traceparent=traceparent,
            tracestate=self.tracestate,
        )
