from __future__ import annotations

import pytest

from router.choice_stream import ChoiceOutput
from router.faces.vllm.answer import Answer
from tandem.types import TokenId, TokenLogprobs

PROMPT = tuple(map(TokenId, (1, 2, 3)))
DELTAS = [
    ChoiceOutput(0, "", (TokenId(token_id),), (TokenLogprobs(TokenId(token_id), -1.0, ((TokenId(7), -0.5),)),))
    for token_id in (3, 4)
]


def test_a_streamed_answer_repeats_its_tokens_but_not_their_log_probabilities() -> None:
    answer = Answer(0, PROMPT, streamed=True)

    chunks = [answer.add(delta) for delta in DELTAS]
    complete = answer.complete("length").complete

    assert [list(chunk.chunk.output_logprobs.token_ids) for chunk in chunks if chunk] == [[3], [4]]
    assert list(complete.output_ids) == [3, 4]
    assert not complete.HasField("output_logprobs")


def test_an_answer_in_one_message_has_the_log_probabilities_of_all_tokens() -> None:
    answer = Answer(0, PROMPT, streamed=False)

    assert [answer.add(delta) for delta in DELTAS] == [None, None]

    complete = answer.complete("length").complete
    assert list(complete.output_ids) == list(complete.output_logprobs.token_ids) == [3, 4]
    assert [list(top.token_ids) for top in complete.output_logprobs.top_logprobs] == [[7], [7]]


@pytest.mark.parametrize("num_top", [0, 1])
@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities_of_the_prompt_come_once_and_the_first_has_no_value(streamed: bool, num_top: int) -> None:
    answer = Answer(0, PROMPT, streamed=streamed)
    of_prompt = tuple(TokenLogprobs(each, -2.0, ((TokenId(7), -0.5),)[:num_top]) for each in PROMPT[1:])
    outputs = [ChoiceOutput(0, "", (), prompt_logprobs=(each,)) for each in of_prompt]

    chunks = [message.chunk for each in (*outputs, *DELTAS) if (message := answer.add(each)) is not None]
    messages = [*chunks, answer.complete("length").complete]
    (scores,) = [each.input_logprobs for each in messages if each.HasField("input_logprobs")]

    assert messages[0].input_logprobs == scores
    assert list(scores.token_ids) == [1, 2, 3]
    assert [each.value if each.HasField("value") else None for each in scores.token_logprobs] == [None, -2.0, -2.0]
    assert [list(each.token_ids) for each in scores.top_logprobs] == [[], [7], [7]][: 3 * num_top]
