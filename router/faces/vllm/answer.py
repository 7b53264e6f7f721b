"""What came of one request, as VllmEngine's chunks and its final message."""

from __future__ import annotations

from collections.abc import Sequence

from router.delivery import ChoiceOutput
from tandem.foreign import vllm_engine_pb2 as pb
from tandem.types import TokenId, TokenLogprobs

ABORTED = "abort"
"""The finish reason of a request that Abort ended."""


class Answer:
    """Gathers one choice's outputs for its final message.

    Streamed, that repeats the tokens alone: with all log-probabilities it would outgrow what clients receive.
    """

    def __init__(self, index: int, num_prompt_tokens: int, *, streamed: bool) -> None:
        self._index = index
        self._num_prompt_tokens = num_prompt_tokens
        self._streamed = streamed
        self._token_ids: list[TokenId] = []
        self._logprobs: list[TokenLogprobs] = []

    def add(self, output: ChoiceOutput) -> pb.GenerateResponse | None:
        """The chunk that says what is new; None if there are no new tokens, or no chunks are wanted."""
        self._token_ids += output.token_ids
        if not self._streamed:
            self._logprobs += output.logprobs
            return None
        if not output.token_ids:
            return None
        chunk = pb.GenerateStreamChunk(
            token_ids=output.token_ids,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(output.token_ids),
            output_logprobs=_logprobs(output.logprobs),
            index=self._index,
        )
        return pb.GenerateResponse(chunk=chunk)

    def complete(self, finish_reason: str, matched_stop: str | TokenId | None = None) -> pb.GenerateResponse:
        """The final message."""
        complete = pb.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=finish_reason,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=len(self._token_ids),
            output_logprobs=_logprobs(self._logprobs),
            index=self._index,
        )
        if isinstance(matched_stop, str):
            complete.matched_stop_str = matched_stop
        elif matched_stop is not None:
            complete.matched_token_id = matched_stop
        return pb.GenerateResponse(complete=complete)


def _logprobs(logprobs: Sequence[TokenLogprobs]) -> pb.OutputLogProbs | None:
    """None if none were asked for."""
    if not logprobs:
        return None
    tops = [
        pb.TopLogProbs(values=[value for _, value in each.top], token_ids=[key for key, _ in each.top])
        for each in logprobs
    ]
    return pb.OutputLogProbs(
        token_logprobs=[each.logprob for each in logprobs],
        token_ids=[each.token_id for each in logprobs],
        top_logprobs=tops if any(each.top for each in logprobs) else [],
    )
