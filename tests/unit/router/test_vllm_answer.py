from __future__ import annotations

from router.delivery import ChoiceOutput
from router.faces.vllm.answer import Answer
from tandem.types import TokenId, TokenLogprobs

DELTAS = [
    ChoiceOutput(0, "", (TokenId(token_id),), (TokenLogprobs(TokenId(token_id), -1.0, ((TokenId(7), -0.5),)),))
    for token_id in (3, 4)
]


def test_a_streamed_answer_repeats_its_tokens_but_not_their_log_probabilities() -> None:
    answer = Answer(0, 5, streamed=True)

    chunks = [answer.add(delta) for delta in DELTAS]
    complete = answer.complete("length").complete

    assert [list(chunk.chunk.output_logprobs.token_ids) for chunk in chunks if chunk] == [[3], [4]]
    assert list(complete.output_ids) == [3, 4]
    assert not complete.HasField("output_logprobs")


def test_an_answer_in_one_message_has_the_log_probabilities_of_all_tokens() -> None:
    answer = Answer(0, 5, streamed=False)

    assert [answer.add(delta) for delta in DELTAS] == [None, None]

    complete = answer.complete("length").complete
    assert list(complete.output_ids) == list(complete.output_logprobs.token_ids) == [3, 4]
    assert [list(top.token_ids) for top in complete.output_logprobs.top_logprobs] == [[7], [7]]
