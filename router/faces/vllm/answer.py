"""Answer to a request, as VllmEngine's chunks and final message."""

from __future__ import annotations

from collections.abc import Sequence

from router.choice_stream import ChoiceOutput
from tandem.foreign import vllm_engine_pb2 as pb
from tandem.types import TokenId, TokenLogprobs

ABORTED = "abort"
"""The finish reason of a request that Abort ended."""


class Answer:
    """Gathers one choice's outputs for its final message.

    Streamed, that repeats the tokens alone: with all log-probabilities it would outgrow what clients receive.
    """

    def __init__(self, index: int, prompt_token_ids: Sequence[TokenId], *, streamed: bool) -> None:
        self._index = index
        self._prompt_token_ids = prompt_token_ids
        self._streamed = streamed
        self._cached_tokens = 0
        self._token_ids: list[TokenId] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        """Log-probabilities of the prompt that no message has brought yet."""

    def add(self, output: ChoiceOutput, cached_tokens: int = 0) -> pb.GenerateResponse | None:
        """The chunk that says what is new; None if there are no new tokens, or no chunks are wanted.

        `cached_tokens`: of the prompt, that were found in a cache.
        """
        self._cached_tokens = cached_tokens
        self._prompt_logprobs += output.prompt_logprobs
        self._token_ids += output.token_ids
        if not self._streamed:
            self._logprobs += output.logprobs
            return None
        if not output.token_ids:
            return None
        chunk = pb.GenerateStreamChunk(
            token_ids=output.token_ids,
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=len(output.token_ids),
            cached_tokens=cached_tokens,
            output_logprobs=_logprobs(output.logprobs),
            input_logprobs=self._input_logprobs(),
            index=self._index,
        )
        return pb.GenerateResponse(chunk=chunk)

    def complete(self, finish_reason: str, matched_stop: str | TokenId | None = None) -> pb.GenerateResponse:
        """The final message."""
        complete = pb.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=finish_reason,
            prompt_tokens=len(self._prompt_token_ids),
            completion_tokens=len(self._token_ids),
            cached_tokens=self._cached_tokens,
            output_logprobs=_logprobs(self._logprobs),
            input_logprobs=self._input_logprobs(),
            index=self._index,
        )
        if isinstance(matched_stop, str):
            complete.matched_stop_str = matched_stop
        elif matched_stop is not None:
            complete.matched_token_id = matched_stop
        return pb.GenerateResponse(complete=complete)

    def _input_logprobs(self) -> pb.InputLogProbs | None:
        """Returns the prompt's log-probabilities at the first call; None afterwards, or if there are none."""
        logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        if not logprobs:
            return None
        return pb.InputLogProbs(
            token_logprobs=[pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=each.logprob) for each in logprobs)],
            token_ids=self._prompt_token_ids[: 1 + len(logprobs)],
            top_logprobs=[pb.TopLogProbs(), *_tops(logprobs)] if any(each.top for each in logprobs) else [],
        )


def _logprobs(logprobs: Sequence[TokenLogprobs]) -> pb.OutputLogProbs | None:
    """None if none were asked for."""
    if not logprobs:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[each.logprob for each in logprobs],
        token_ids=[each.token_id for each in logprobs],
        top_logprobs=_tops(logprobs) if any(each.top for each in logprobs) else [],
    )


def _tops(logprobs: Sequence[TokenLogprobs]) -> list[pb.TopLogProbs]:
    return [
        pb.TopLogProbs(values=[value for _, value in each.top], token_ids=[key for key, _ in each.top])
        for each in logprobs
    ]
