"""What a fake worker says in the place of a model: a function of prompt, choice and position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandem.convert import logprobs_to_proto
from tandem.types import ChoiceSpec, GroupSpec, TokenId, TokenLogprobs
from tandem.v1 import inference_pb2


def token_at(prompt: Iterable[int], offset: int, index: int = 0) -> TokenId:
    """The fake model: a letter that depends on the prompt, on where it stands, and on the choice."""
    return TokenId(ord("a") + (sum(prompt) + 7 * offset + 5 * index) % 26)


def drawn_with_prompt(spec: GroupSpec) -> Sequence[ChoiceSpec]:
    """The choices whose next token comes from whoever computes the prompt."""
    return spec.choices if len(spec.choices) == 1 else [each for each in spec.choices if not each.output_token_ids]


def prompt_logprobs_of(spec: GroupSpec) -> list[tuple[int, list[inference_pb2.TokenLogprobs]]]:
    """Offset and content of the messages that tell those of a prompt, two tokens in each; none if not asked for."""
    if spec.sampling.prompt_logprobs is None:
        return []
    scores = [logprobs_to_proto(TokenLogprobs(each, -0.25 * each)) for each in spec.prompt_token_ids]
    return [(at, scores[at : at + 2]) for at in range(1, len(scores), 2)]
